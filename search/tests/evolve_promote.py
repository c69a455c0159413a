#!/usr/bin/env python3
"""A promotion from end to end, in a copy of the tree: a search on the CPU finds a kernel that beats a detuned one, its
trial becomes a line of kernels.def and a fact of wisdom, the tree builds, the kernel passes conformance, and `why`
shows it chosen.

    evolve_promote.py PROGRAM SCRATCH
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import cached_compiler

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROBLEM = "f32:b1:h2:s96:d64"
COPIED = ["CMakeLists.txt", "cmake", "include", "integrations", "src", "workbench", "search", "cli", "python", "docs",
          "tools", "wisdom"]


def run(*command, code=0, **how):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **how)
    if done.returncode != code:
        words = " ".join(map(str, command))
        sys.exit(f"{words}: exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def copy_tree(to):
    """The tree without its other families' lines, so that little is compiled."""
    for name in COPIED:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, to / name)
    lines = (to / "src/kernels.def").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("KERNEL(") or "fwd_simd_f32" in line]
    (to / "src/kernels.def").write_text("".join(kept))


def main():
    program, scratch = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    folder = scratch / f"promote.{os.getpid()}"
    tree = folder / "tree"
    tree.mkdir(parents=True)
    try:
        copy_tree(tree)
        compilers = dict(os.environ)  # the tree's build has none that remembers
        cached_compiler.use(scratch / "tests/scratch/compiled")
        start = "fwd_simd portable DTYPE=ACR_F32 DIM=1024 Q_TILE=64 KV_TILE=8 ROW_VECS=1 COLUMNS=1 UNROLL=1"
        conclusions = []
        for seed in range(1, 6):  # a search may find nothing, and a busy machine may hide what it found
            store = folder / f"run{seed}.db"
            run(program, "evolve", "--backend", "cpu", PROBLEM, "--trials", 8, "--cases", 2, "--from", start, "--seed",
                seed, "--store", store, "--tree", tree)
            summary = json.loads(run(program, "trials", "summary", "--json", "--store", store))
            won = summary["search"]["confirmed"]
            if won:
                break
            conclusions.append(summary["conclusion"])
        else:
            sys.exit(f"FAILED: five searches of eight trials did not beat a kernel with one column: {conclusions}")
        slowest = next(t for t in json.loads(run(program, "trials", "list", "--json", "--store", store))
                       if not t["confirmed"])
        before = (tree / "src/kernels.def").read_text()
        run(program, "promote", slowest["id"], "--store", store, "--tree", tree, code=1)
        if (tree / "src/kernels.def").read_text() != before:
            sys.exit("FAILED: a refused promotion changed kernels.def")

        run("cmake", "-S", tree, "-B", tree / "build", "-G", "Ninja", "-DACR_TESTS=OFF", "-DACR_CUDA=OFF",
            env=compilers)
        told = run(program, "promote", won["trial"], "--store", store, "--tree", tree)
        after = (tree / "src/kernels.def").read_text()
        added = [line for line in after.splitlines() if line not in before.splitlines()]
        if len(added) != 1 or won["kernel"] not in added[0]:
            sys.exit(f"FAILED: kernels.def gained {added}")
        found = f"found by evolve, trial {won['trial']} ("
        wisdom = told.split("\nwisdom: ")[1].splitlines()[0]
        why = run(tree / "build/workbench/acromion", "why", "--backend", "cpu", "--wisdom", wisdom, PROBLEM)
        if found not in why or store.name not in why:
            sys.exit(f"FAILED: why does not say where the kernel is from:\n{why}")
        if f"{won['kernel']} (wisdom:" not in told:
            sys.exit(f"FAILED: why does not show the kernel chosen by wisdom:\n{told}")
        new = tree / "build/workbench/acromion"
        run(new, "check", "--backend", "cpu", "-k", won["kernel"])
        again = run(program, "promote", won["trial"], "--store", store, "--tree", tree)
        if "already" not in again or (tree / "src/kernels.def").read_text() != after:
            sys.exit("FAILED: promoting twice is not the same as promoting once")
        print(f"promoted: {added[0]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
