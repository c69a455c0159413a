#!/usr/bin/env python3
"""Writes docs/manual/features.md: which kernel family serves which feature at which head dims, asked of the program.

    features.py PROGRAM            prints the page
    features.py PROGRAM --write    writes it
    features.py PROGRAM --check    exit code 1 where the page in the tree is another

PROGRAM is a build with every kernel (the CUDA ones need no GPU: the question is asked for an H200)."""
import json
import pathlib
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs/manual/features.md"
DIMS = (32, 64, 96, 128, 192, 256, 512)

FORWARD = ("f32", "f16", "bf16", "e4m3")

# A feature's name and its fields of a problem's text; {q}: the query length, {kv}: the key length. A third entry: the
# types that have it, if not all.
FEATURES = (
    ("no mask", ""),
    ("causal mask", ":causal"),
    ("sliding window", ":causal:win100"),
    ("key lengths", ":kvlens"),
    ("packed batch", ":packed:bshd"),
    ("log-sum-exp", ":lse", FORWARD),
    ("output in float32 (`of32`)", ":of32:lse", ("f16", "bf16")),
    ("softcap", ":causal:cap50"),
    ("sinks", ":causal:sinks"),
    ("additive bias", ":bias-bf16/0,{area},{kv}"),
    ("boolean mask", ":mask/{area},0,{kv}"),
    ("ALiBi", ":causal:alibi"),
    ("chunks", ":causal:chunk128"),
    ("key starts (left padding)", ":causal:kvstarts"),
    ("ranges", ":causal:win64:ranges4"),
    ("tree mask", ":causal:tree"),
    ("cache in pages of 16", ":kvlens:page16", FORWARD),
    ("packed queries over such a cache", ":packed:bshd:kvlens:page16", FORWARD),
    ("8-bit cache (`kv-e4m3`)", ":kv-e4m3", FORWARD),
    ("8-bit cache in pages of 16", ":kvlens:page16:kv-e4m3", FORWARD),
)
SHAPES = ((512, 512), (1, 2048), (4, 2048))  # prompt, decoding, several positions

# (title, why's arguments, types, families)
TABLES = (
    ("An H200, 16-bit inputs (f16 and bf16)", ("--gpu", "h200"), ("f16", "bf16"),
     ("fwd_wgmma", "fwd_wide", "fwd_short", "fwd_decode", "fwd_split", "fwd_mma", "fwd_simt")),
    ("An H200, e4m3 inputs", ("--gpu", "h200"), ("e4m3",), ("fwd_fp8", "fwd_short", "fwd_mma8", "fwd_simt")),
    ("An H200, f32 inputs", ("--gpu", "h200"), ("f32",), ("fwd_simt",)),
    ("A CPU", ("--backend", "cpu"), FORWARD, ("fwd_row", "fwd_simd")),
    ("Gradients on an H200, bf16", ("--gpu", "h200"), ("bwd:bf16",), ("bwd_wgmma", "bwd_short", "bwd_mma")),
    ("Gradients on an H200, f16", ("--gpu", "h200"), ("bwd:f16",), ("bwd_wgmma", "bwd_short", "bwd_mma")),
    ("Gradients on a CPU", ("--backend", "cpu"), ("bwd:f32", "bwd:f16", "bwd:bf16"), ("bwd_simd",)),
)

# What families lack on purpose: (families, features, reason).
REASONS = (
    ("`fwd_wgmma`", "trees", "they read a byte of global memory for each score, and have few rows, which `fwd_decode` "
     "and `fwd_split` serve"),
    ("`fwd_wide`", "all terms", "a consumer holds 128 registers of outputs beside both halves' probabilities; "
     "`fwd_mma` serves them at 512"),
    ("`fwd_short`", "ALiBi", "it takes a row's reference from its first keys, and with ALiBi the last ones win: most "
     "tiles would be computed twice"),
    ("`fwd_short`", "biases, masks, trees, ranges", "they are read between a product and its exponentials, or before "
     "the first load, with nothing to hide that under"),
    ("`fwd_short`", "packed batches, pages", "its first loads begin before anything is read"),
    ("`bwd_wgmma`", "biases above 64 dims, or in float32", "a thread has no registers for them; `bwd_mma` serves them, "
     "slower than PyTorch's kernels"),
    ("gradients", "ranges, trees", "no kernel takes a row's partners from several intervals"),
    ("`fwd_fp8`, `fwd_mma8`, `fwd_short` of e4m3", "all terms", "their threads' registers are used up (`fwd_fp8`'s "
     "four consumers keep even their scales in shared memory, `fwd_mma8`'s lines stand at their bounds of 120 and "
     "168); a cap and biases want each score scaled by its head's scales first; and a cap's second MUFU would double "
     "the exponentials, which take as long as 8-bit products. `fwd_simt` serves them, slowly"),
)


def problems(dtype, fields):
    """(dim, text) of every probe."""
    for dim in DIMS:
        for q, kv in SHAPES:
            yield dim, f"{dtype}:b2:h8/2:s{q}/{kv}:d{dim}" + fields.format(kv=kv, area=q * kv)


def served(program, device, dtypes, fields):
    """{family: head dims at which some line of every type serves the feature}"""
    by_type = []
    for dtype in dtypes:
        probes = list(problems(dtype, fields))
        answer = subprocess.run([program, "why", "--json", *device, *(text for _, text in probes)],
                                capture_output=True, text=True)
        if not answer.stdout:
            sys.exit(f"features.py: {answer.stderr}")
        found = {}
        for (dim, _), entry in zip(probes, json.loads(answer.stdout), strict=True):
            for kernel in entry["kernels"]:
                if kernel["verdict"] != "no":
                    found.setdefault("_".join(kernel["kernel"].split("_")[:2]), set()).add(dim)
        by_type.append(found)
    return {family: set.intersection(*(found.get(family, set()) for found in by_type))
            for family in {name for found in by_type for name in found}}


def dims_text(dims):
    below = sorted(dims)
    if not below:
        return "–"
    if len(below) > 1 and below == [dim for dim in DIMS if dim <= below[-1]]:
        return f"to {below[-1]}"
    return ", ".join(map(str, below))


def reasons():
    return ["## Why not", "", "What families lack on purpose:", "", "| family | lacks | since |", "|---|---|---|",
            *(f"| {' | '.join(entry)} |" for entry in REASONS), ""]


def page(program):
    lines = ["# Features and kernels", "",
             "Written by `tools/features.py` from what the program answers (`acromion why`): the head dims, of",
             f"{', '.join(map(str, DIMS))}, at which a family has a line that serves a feature; smaller and odd",
             "head dims are padded inside where \"to\" stands. Features combine: what a line serves, it serves",
             "with masks, windows, key lengths, grouped heads and the log-sum-exp. What none serves is refused",
             "by name. The teaching ladder serves masks alone.", ""]
    for title, device, dtypes, families in TABLES:
        lines += [f"## {title}", "", "| feature | " + " | ".join(f"`{f}`" for f in families) + " |",
                  "|---" * (len(families) + 1) + "|"]
        for name, fields, *only in FEATURES:
            types = [dtype for dtype in dtypes if not only or dtype in only[0]]
            if not types:
                continue
            found = served(program, device, types, fields)
            lines.append(f"| {name} | " + " | ".join(dims_text(found.get(f, set())) for f in families) + " |")
        lines.append("")
    return "\n".join(lines + reasons())


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    text = page(sys.argv[1])
    if "--write" in sys.argv:
        PAGE.write_text(text)
    elif "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.exit(f"{PAGE} is not what the program answers; write it again by tools/features.py PROGRAM --write")
    else:
        print(text)


if __name__ == "__main__":
    main()
