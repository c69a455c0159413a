#!/usr/bin/env python3
"""Everything that a machine with a GPU has to say about this tree, in steps: python3 gpu_day.py all

    gpu_day.py --list                                     the steps, in order of importance, and what each takes
    gpu_day.py [-o FOLDER] [--budget S] STEP...|all       runs them; a step's name, or the part before its dot
    gpu_day.py -o FOLDER --merge FOLDER...                puts what several days left into one folder

It lies beside the program in a bundle (./run bundle), or in tools/ of a built tree. Each step is independent of the
others and has a limit of time. FOLDER (default gpu-day) receives at most eight files, written after every step:
day.json (what became of each step), day.log, and as far as there is something bench.json, check.json, grid.json,
profile.json, gpu.wisdom, more.tar.gz. Steps that FOLDER, or a folder named by --after, holds as passed are not run
again.

Exit code: 0 all passed; 1 a step failed; 2 the command line; 4 a step cannot run here, and what it lacks is said; 7 the
budget left steps unrun, or a step (a search) wants to go on another time."""
import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

PASSED, FAILED, CANNOT, UNFINISHED, UNRUN = "passed", "failed", "cannot run here", "unfinished", "not run"
DONE, EXIT_FAILED, EXIT_USAGE, EXIT_CANNOT_RUN, EXIT_UNFINISHED = 0, 1, 2, 4, 7
SKIPPED_TEST = 77  # what our tests end with where they cannot run

# ---- What is run: lists ----------------------------------------------------------------------------------------------

# Small, since racecheck slows a kernel down a thousandfold, and ragged, since that is where faults hide. Every kernel
# gets one of its type: with 32 dims those of 32 take part, too.
SMALL = ["b1:h2:s65:d64", "b1:h4/2:s33/70:d64:causal:lse", "b1:h2:s20/40:d32", "bf16:b2:h2:s17/40:d128:kvlens",
         "bf16:b1:h2/1:s33/70:d32:causal", "f32:b1:h1:s20:d40:align4", "b6:h2/1:s40/70:d64:causal:bshd:packed:lse",
         "b3:h2:s20/40:d32:bshd:packed", "bf16:b6:h2/1:s40/70:d32:causal:bshd:packed", "e4m3:b1:h2:s70:d64",
         "b1:h8/1:s33/70:d64:causal:lse:sinks", "bf16:b1:h8/1:s33/70:d64:causal:win20", "b1:h1:s70/512:d64:lse",
         "bf16:b1:h1:s70/512:d64", "e4m3:b1:h4/2:s33/70:d128:causal:lse",
         "e4m3:b6:h2/1:s40/70:d64:causal:bshd:packed:lse", "b2:h4/2:s1/70:d64:kvlens:page16",
         "bf16:b2:h4/2:s3/70:d64:kvlens:page8", "b2:h4/2:s1/70:d128:kvlens:page16:kv-e4m3",
         "bf16:b2:h4/2:s3/70:d128:kvlens:page8:kv-e4m3", "b1:h4/2:s33/70:d64:causal:lse:kv-e4m3",
         "bf16:b2:h4/2:s33/70:d64:kvlens:kv-e4m3", "b1:h128/1:s1/70:d576/512:v-in-k",
         "bf16:b1:h128/1:s1/70:d576/512:kvlens:v-in-k", "b1:h4/2:s33/70:d64:causal:lse:of32",
         "bf16:b1:h4/2:s33/70:d64:causal:lse:of32"]
# racecheck does not follow every order made by mbarriers and named barriers, so it is not run on kernels that hand
# things over by them: fwd_wgmma, fwd_fp8 and fwd_ladder5 (a tile's index, written after the consumers' arrivals),
# fwd_mma with key groups and fwd_split's lines of 32 rows (partial results, published before the barrier of all).
RACECHECK = ["fwd_simt*", "fwd_short*", "fwd_mma_*_s2_[prsw]*", "fwd_mma8*", "fwd_split_*_16x*", "fwd_decode*",
             "fwd_ladder[0-4]*"]
# 250 runs after the first: decoding, split and not, lengths of batch entries, every head dim.
RERUN = ["fwd_split*", "fwd_decode*"]
RERUNS = ["b1:h32/8:s1/2048:d128", "b8:h32/8:s1/700:d128:kvlens", "bf16:b2:h8:s3/1111:d64:causal", "b1:h4:s16/999:d256",
          "b1:h4:s1/1500:d192", "b1:h4/1:s4/3000:d64:causal"]
# Where CTAs of a cluster tell each other things, beside processes whose kernels never end (beside.py): many work tiles
# that are soon done, of which one may be lost, and work of hundreds of microseconds, of which the GPU leaves a part
# halfway.
BESIDE = [("bwd_wgmma*_pair*", 3, ["bwd:bf16:b3:h5:s1/10007:d64:win251:grad-f32",
                                   "bwd:bf16:b3:h5:s1/10007:d128:win251:grad-f32",
                                   "bwd:bf16:b2:h16/2:s1/10007:d256:win64:grad-f32:kvlens"]),
          ("bwd_wgmma*_pair*", 30, ["bwd:bf16:b1:h8:s2048:d64", "bwd:bf16:b1:h8:s2048:d128",
                                    "bwd:bf16:b1:h8:s1024:d256"]),
          ("fwd_decode_f16_d128_*", 30, ["b8:h32/8:s1/8192:d128"])]
# More than 2^31 elements of q and o, and of k and v: 256 rows of each are compared. Needs 40 GB of host memory, and the
# host's processors for minutes, to make the inputs and to look at every output.
LARGE = [("fwd_[mw]*_f16_d128_*", "b1:h64/1:s262500/100:d128:bshd"), ("fwd_[dmsw]*_f16_d128_*", "b300:h8:s1/7000:d128")]
MISSION = "b2:h8:s512:d64"
# The tables' rows beside the peers. Long ones take up to a minute each.
PEERS = {
    "latency": [MISSION, MISSION + ":causal", "bf16:" + MISSION, "bf16:" + MISSION + ":causal", "b1:h8:s128:d64",
                "b1:h8:s1024:d64", "b1:h16:s1024:d64", "b1:h16:s1024:d64:causal", "b2:h8:s512:d128"],
    "decode": ["b32:h32/8:s1/8192:d128", "b1:h32/8:s1/32768:d128", "b8:h32/8:s1/2048:d128", "b1:h32/8:s1/2048:d128",
               "bf16:b32:h32/8:s1/8192:d128", "bf16:b1:h32/8:s1/32768:d128", "b1:h8:s64/4096:d64",
               "b1:h16:s1/4096:d256"],
    "long": ["b4:h16:s2048:d64", "b4:h16:s2048:d64:causal", "b2:h16:s4096:d128", "b2:h16:s4096:d128:causal",
             "b8:h32/8:s2048:d128:causal", "b4:h8:s2048:d256:causal"],
    "bf16": ["bf16:b4:h16:s2048:d64", "bf16:b2:h16:s4096:d128", "bf16:b2:h16:s4096:d128:causal"],
    "dims": ["b4:h16:s2048:d96:causal", "b4:h16:s2048:d192:causal", "b4:h16:s2048:d192/128:causal", "b4:h8:s2048:d256"],
    "longest": ["b1:h16:s16384:d128", "b1:h16:s16384:d128:causal", "b1:h16:s16384:d64"],
}
# fp8, packed batches and key lengths: no peer can be given them.
FP8 = ["e4m3:b4:h16:s2048:d64", "e4m3:b4:h16:s2048:d64:causal", "e4m3:b2:h16:s4096:d128",
       "e4m3:b2:h16:s4096:d128:causal", "e4m3:b1:h16:s16384:d128:causal", "e4m3:b2:h8:s4096:d256",
       "e4m3:b2:h8:s4096:d192", "e4m3:b2:h8:s512:d64"]
PACKED = ["b16:h16:s2048:d64:bshd:packed", "b16:h16:s2048:d128:causal:bshd:packed"]
LENGTHS = [("fwd_split", "b16:h32/8:s1/8192:d128:kvlens"), ("fwd_decode", "b2:h32/8:s1/2048:d128:kvlens")]
MODES = ["rotating", "cold", "call", "call-single"]
HOST_COST = [MISSION, "b4:h16:s2048:d64", "b8:h32/8:s1024:d128:causal"]
PROFILED = [("b32:h32/8:s1/8192:d128", "fwd_split_f16_d128_16*"), ("b1:h32/8:s1/32768:d128", "fwd_split_f16_d128_16*"),
            ("b1:h32/8:s1/2048:d128", "fwd_decode_f16_d128_*"), (MISSION, "fwd_short_f16_d64_64x128_s4_sm90a"),
            ("b1:h16:s1024:d64", "fwd_short_f16_d64_128x64_s6_ring_sm90a")]
TIMELINES = PROFILED[2:]


@dataclasses.dataclass
class Command:
    """One process of a step. output says what becomes of what it makes: "log" (nothing more), "records" (it is given
    -o and a file of records for `into`), "check" or "grid" (JSON on standard output, a grid for `into`), "wisdom" (-o
    and the file of choices), "folder" (its last argument is a folder, kept in more.tar.gz)."""
    argv: list
    output: str = "log"
    into: str = "bench.json"


@dataclasses.dataclass
class Step:
    name: str
    about: str
    seconds: int  # expected on an H200
    known: bool   # whether that was measured once, or is a guess
    commands: object  # a function of the Day
    together: bool = False  # nothing is timed: runs beside others
    lacks: object = None  # a function of the Day: what is missing here, or None


# ---- Where things are ------------------------------------------------------------------------------------------------

class Place:
    """The program and what belongs to it: in a bundle beside this script, or in a tree with a build."""

    def __init__(self):
        here = pathlib.Path(__file__).resolve().parent
        self.root = here if (here / "src").is_dir() else here.parent
        packed = here / "programs.tar.xz"  # of a bundle: gpu_controls and exploits, which hold the same images
        if packed.is_file() and not (here / "gpu_controls").exists():
            with tarfile.open(packed) as programs:
                programs.extractall(here, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        build = pathlib.Path(os.environ.get("ACR_BUILD", self.root / "build"))
        bundled = self.root / "acromion"
        self.program = pathlib.Path(os.environ.get("ACROMION", bundled if bundled.is_file()
                                                   else build / "workbench/acromion"))
        self.controls = self.first(self.root / "gpu_controls", build / "tests/gpu_controls")
        self.exploits = self.first(build / "tests/exploits")
        self.build = build
        wheels = sorted(self.root.glob("*.whl")) + sorted(self.root.glob("dist/*.whl"))
        self.wheel = wheels[-1] if wheels else None
        self.variants = self.first(self.root / "variants")
        self.evolve = self.first(self.root / "tools/gpu-campaign.sh", self.root / "gpu-campaign.sh")

    @staticmethod
    def first(*paths):
        return next((path for path in paths if path.exists()), None)


def find_tool(name, *folders):
    """A program on PATH, in the CUDA toolkit, or in one of these folders."""
    for folder in (os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", *folders):
        found = shutil.which(name) or shutil.which(name, path=folder)
        if found:
            return found
    return None


class Day:
    """One run of this script: its place, what it was asked, and its output."""

    def __init__(self, place, out, tiny):
        self.place, self.out, self.tiny = place, out, tiny
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="acromion-day-"))
        self.lock = threading.Lock()
        self.torch = None  # not asked yet
        self.commit = None  # likewise

    def cut(self, items):
        return list(items)[:1] if self.tiny else list(items)

    def acromion(self, *arguments):
        return [str(self.place.program), *arguments]

    # What steps may lack. None, or the reason.

    def lacks_sanitizer(self):
        return None if find_tool("compute-sanitizer") else "compute-sanitizer: not on PATH, nor in CUDA_HOME/bin"

    def lacks_torch(self):
        if self.torch is None:
            python = os.environ.get("PYTHON", "python3")
            asked = subprocess.run([python, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            self.torch = asked.returncode == 0
        return None if self.torch else "python3 has no PyTorch that sees a GPU"

    def lacks_python(self):
        return self.lacks_torch() or (None if self.place.wheel else "no wheel: ./run wheel makes it")

    def lacks_ncu(self):
        found = find_tool("ncu", *sorted(map(str, pathlib.Path("/opt/nvidia/nsight-compute").glob("*")))[::-1])
        return None if found else "ncu, Nsight Compute: not on PATH, nor in CUDA_HOME/bin, nor in /opt/nvidia"

    def nvcc(self):
        named = os.environ.get("ACR_NVCC")
        return named if named and os.access(named, os.X_OK) else find_tool("nvcc", self.place.build / "toolchain/bin")

    def lacks_nvcc(self):
        return None if self.nvcc() else "nvcc: not on PATH, nor in CUDA_HOME/bin, nor named by ACR_NVCC"

    def lacks_exploits(self):
        return self.lacks_nvcc() or (None if self.place.exploits else "tests/exploits: not built")

    def lacks_controls(self):
        return None if self.place.controls else "gpu_controls: not built"

    def lacks_variants(self):
        return None if self.place.variants or not variant_groups(self) else self.lacks_nvcc()

    def lacks_evolve(self):
        return self.lacks_nvcc() or (None if self.place.evolve else "tools/gpu-campaign.sh: not here")


# ---- The steps -------------------------------------------------------------------------------------------------------

TINY_KERNEL, TINY_PROBLEM = "fwd_short_f16_d64_32x128_s2_sm90a", "b1:h1:s20:d64"


def check(day, pattern, *arguments):
    if day.tiny:
        pattern, arguments = TINY_KERNEL, ["--inputs", "normal", TINY_PROBLEM]
    return Command(day.acromion("check", "--backend", "cuda", "--json", "-k", pattern, *arguments), "check")


def sanitizer(day, tool, patterns):
    runs = []
    for pattern in day.cut(patterns):
        runs.append(Command([find_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "86",
                             *day.acromion("check", "--backend", "cuda", "-k", pattern, *day.cut(SMALL))]))
    return runs


def bench(day, *arguments, into="bench.json"):
    return Command(day.acromion("bench", "--backend", "cuda", *arguments), "records", into)


def grid(day, part, parts, name="planner_grid.txt"):
    """One part of a list of problems, so that a limit of time cannot take all of it."""
    listed = [line for line in (day.place.root / "tools" / name).read_text().split("\n")
              if line and not line.startswith("#")]
    return day.cut(listed[part::parts])


def measure_grid(day, problems, into):
    return [Command(day.acromion("why", "--backend", "cuda", "--measure", "--json", *problems), "grid", into)]


def variant_groups(day):
    """tools/variants.txt: the problems of each base kernel, and its variants."""
    groups = {}
    for line in (day.place.root / "tools/variants.txt").read_text().split("\n"):
        words = line.split("#")[0].split()
        if words:
            base = words[0].split(":")[0]
            problems, texts = groups.setdefault(base, ([], []))
            texts.append(words[0])
            problems.extend(word for word in words[1:] if word not in problems)
    return groups


def variants(day):
    found = []
    for problems, texts in day.cut(variant_groups(day).values()):
        asked = []
        for text in texts:
            built = day.place.variants / text.replace(":", "+", 1) if day.place.variants else None
            if built and built.is_dir():  # compiled where no GPU waited for it
                one = day.scratch / "variants" / built.name
                one.mkdir(parents=True, exist_ok=True)
                if not (one / built.name).exists():
                    (one / built.name).symlink_to(built)
                asked += ["--variant", str(one)]
            else:
                asked += ["--variant", text]
        tiny = ["--inputs", "normal", TINY_PROBLEM] if day.tiny else []
        found.append(Command(day.acromion("check", "--backend", "cuda", "--json", *asked, *tiny), "check"))
        found.append(bench(day, *asked, *problems, into="variants.json"))
    return found


def steps():
    run = []

    def add(name, about, seconds, commands, *, known=False, together=False, lacks=None):
        run.append(Step(name, about, seconds, known, commands, together, lacks))

    def add_peers(name, seconds):
        add(f"peers.{name}", f"beside PyTorch and cuBLAS, {len(PEERS[name])} rows", seconds,
            lambda d: [bench(d, "--peers", "torch,cublas", "--publish", *d.cut(PEERS[name]))], known=True,
            lacks=Day.lacks_torch)

    add("info", "device, driver, which kernels run here", 2,
        lambda d: [Command(d.acromion("info")), Command(d.acromion("why", "--backend", "cuda", MISSION))], known=True)
    # The oracle takes all processors: 178 s for the first list alone, 181 s for the second beside the first.
    add("check.first", "conformance: fwd_simt, fwd_short, fwd_split, fwd_wgmma, fwd_wide, packed lines", 180,
        lambda d: [check(d, "fwd_[sw]*")], known=True, together=True)
    add("check.second", "conformance: fwd_decode, fwd_fp8, fwd_mma, the ladder, packed lines", 180,
        lambda d: [check(d, "fwd_[!sw]*")], known=True, together=True)
    add("reruns", "250 reruns of fwd_split and fwd_decode, bitwise equal", 20,
        lambda d: [check(d, kernels, "--inputs", "normal", "--reruns", "250", *RERUNS) for kernels in RERUN],
        together=True)
    add("beside", "clusters, beside three processes whose kernels never end", 60,
        lambda d: [Command([sys.executable, str(d.place.root / "tools/beside.py"), "--nvcc", d.nvcc() or "nvcc",
                            "--limit", "60", "--", *d.acromion("check", "--backend", "cuda", "-k", kernels, "--inputs",
                                                               "normal", "--reruns", str(reruns), *problems)])
                   for kernels, reruns, problems in d.cut(BESIDE)], lacks=Day.lacks_nvcc)
    for tool in ("memcheck", "initcheck", "synccheck"):
        add(f"sanitize.{tool}", f"compute-sanitizer {tool} of every kernel, small cases", 15,
            lambda d, tool=tool: sanitizer(d, tool, ["fwd_*"]), known=True, together=True,
            lacks=Day.lacks_sanitizer)
    add("sanitize.racecheck", "compute-sanitizer racecheck, where it follows the barriers", 200,
        lambda d: sanitizer(d, "racecheck", RACECHECK), together=True, lacks=Day.lacks_sanitizer)
    add("controls", "cheating kernels are caught while timed, a slowdown of 5 % is found", 17,
        lambda d: [Command([str(d.place.controls)])], known=True, lacks=Day.lacks_controls)
    for name, seconds in (("latency", 33), ("decode", 60), ("long", 55)):
        add_peers(name, seconds)
    for part in range(2):
        add(f"grid.{part + 1}", "every kernel on the planner's grid, one half", 32,
            lambda d, part=part: measure_grid(d, grid(d, part, 2), "grid.json"), known=True)
    add("grid.unseen", "every kernel on the problems that no fit sees", 19,
        lambda d: measure_grid(d, grid(d, 0, 1, "planner_unseen.txt"), "unseen.json"), known=True)
    # Not beside the conformance lists: it starves them, and they it (160 and 204 s).
    for part, (name, seconds) in enumerate((("queries", 160), ("keys", 200))):
        add(f"large.{name}", f"more than 2^31 elements of {('q and o', 'k and v')[part]}", seconds,
            lambda d, part=part: [check(d, LARGE[part][0], "--inputs", "normal", LARGE[part][1])], known=True)
    for part in range(2):
        add(f"wisdom.{part + 1}", "the choices of the grid, one half", 10,
            lambda d, part=part: [Command(d.acromion("wisdom", "measure", "--backend", "cuda", *grid(d, part, 2)),
                                          "wisdom")], known=True)
    add("variants", "prepared experiments of tools/variants.txt beside their kernels", 80, variants, known=True,
        lacks=Day.lacks_variants)
    add("exploits", "every cheat of tests/exploits is refused by the search's gates", 32,
        lambda d: [Command(["sh", str(d.place.root / "tests/exploits/gpu.sh"), str(d.place.build)])],
        known=True, lacks=Day.lacks_exploits)
    add("alone", "fp8, packed batches and key lengths, ours alone", 55,
        lambda d: [bench(d, "--quick", "-k", "fwd_fp8", *d.cut(FP8)),
                   *(bench(d, "--quick", "--lengths", lengths, "-k", kernels, *d.cut(problems))
                     for kernels, *problems in (("fwd_wgmma_*packed*", *PACKED), *LENGTHS)
                     for lengths in ("full", "skewed"))], known=True)
    add("modes", "the mission shape in the other modes", 40,
        lambda d: [bench(d, "--peers", "torch,cublas", "--mode", mode, MISSION) for mode in d.cut(MODES)],
        lacks=Day.lacks_torch)
    add("overlap", "launches that overlap their predecessor", 15,
        lambda d: [bench(d, "--overlap", "--quick", "-k", "fwd_short", *d.cut([MISSION, MISSION + ":causal"])),
                   bench(d, "--overlap", "--quick", "-k", "fwd_decode", "b1:h32/8:s1/2048:d128"),
                   bench(d, "--overlap", "--quick", "-k", "fwd_split", "b8:h32/8:s1/2048:d128")])
    add("host-cost", "bare launch, acr_execute, acr_forward, first call of a process", 30,
        lambda d: [bench(d, "--host-cost", *d.cut(HOST_COST))])
    add("ladder", "the teaching ladder", 10, lambda d: [bench(d, "--quick", "-k", "fwd_ladder*", MISSION)])
    add("profile", "counters of fwd_split and fwd_decode at decode rows, and of fwd_short", 18,
        lambda d: [Command(d.acromion("profile", "--backend", "cuda", problem, "-k", kernel), "records", "profile.json")
                   for problem, kernel in d.cut(PROFILED)], known=True, lacks=Day.lacks_ncu)
    add("timeline", "cycles of the steps of fwd_decode and fwd_short", 6,
        lambda d: [Command(d.acromion("profile", "--backend", "cuda", "--timeline", problem, "-k", kernel), "records",
                           "profile.json") for problem, kernel in d.cut(TIMELINES)], known=True, lacks=Day.lacks_nvcc)
    add("python", "the Python package's tests and times beside SDPA's", 135,
        lambda d: [Command(["bash", str(d.place.root / "tools/gpu-python.sh"), str(d.place.wheel)], "folder",
                           "python")], known=True, lacks=Day.lacks_python)
    for name, seconds in (("bf16", 30), ("longest", 160), ("dims", 110)):
        add_peers(name, seconds)
    add("evolve", "searches on this GPU (tools/gpu-campaign.sh)", 300,
        lambda d: [Command(["bash", str(d.place.evolve), "--seconds", "280", "--survey", "0", "--run", "mission",
                            "b2:h8:s512:d64 b2:h8:s512:d64:causal", "--run", "large",
                            "b4:h16:s2048:d64 b4:h16:s2048:d64:causal"], "folder", "evolve")],
        lacks=Day.lacks_evolve)
    return run


def limit_of(step):
    """Generous: a limit is there for what hangs."""
    return 60 + 3 * step.seconds


# ---- Output ----------------------------------------------------------------------------------------------------------

def read_json(path, otherwise):
    return json.loads(path.read_text()) if path.is_file() else otherwise


def write_json(path, document):
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.rename(path)


IDENTITY = {  # of a record: a later one with the same replaces it
    "bench.json": ("problem", "kernel", "peer", "mode", "overlap", "lengths", "step", "rung"),
    "variants.json": ("problem", "kernel", "mode", "overlap"),
    "profile.json": ("kind", "problem", "kernel"),
    "check.json": ("step", "part"),
    "grid.json": ("problem",),
    "unseen.json": ("problem",),
    "day.json": ("step",),
}


def merge_records(path, added):
    """Adds records to a file of them, in place of those that they repeat."""
    fields = IDENTITY[path.name]
    kept = {}
    for record in read_json(path, []) + added:
        key = tuple(record.get(field) for field in fields)
        kept.pop(key, None)
        kept[key] = record
    write_json(path, list(kept.values()))


FAILURES_KEPT = 100


def check_summary(step, part, asked, document):
    """As results/check/*.json have it: counts of each kernel, and of what failed the beginning, whole."""
    return {"step": step, "part": part, "asked": asked,
            **{key: value for key, value in document.items() if key not in ("kernels", "records")},
            "kernels": [{"kernel": k["kernel"], "cases": k["passed"] + k["failed"], "failed": k["failed"],
                         "largest_share_of_tolerance": round(k["worst_share"], 3)}
                        for k in document["kernels"] if "not_run" not in k],
            "failures": [record for record in document["records"] if not record["pass"]][:FAILURES_KEPT]}


def pack_more(day):
    """The folder `more` as one file, where it holds anything."""
    more = day.scratch / "more"
    if not more.is_dir():
        return
    partial = day.out / "more.tar.gz.partial"
    with tarfile.open(partial, "w:gz") as archive:
        for path in sorted(more.iterdir()):
            archive.add(path, path.name)
    partial.rename(day.out / "more.tar.gz")


def unpack_more(day, archive):
    more = day.scratch / "more"
    more.mkdir(exist_ok=True)
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            target = (more / member.name).resolve()
            if target.is_relative_to(more.resolve()) and (member.isfile() or member.isdir()):
                packed.extract(member, more)


# ---- Running ---------------------------------------------------------------------------------------------------------

def run_process(argv, limit_s, stdout, stderr, environment, cwd):
    """The exit code, or None where it was killed with all that it had started."""
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, cwd=cwd,
                          start_new_session=True) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def commit_of(day, environment):
    """What the program was built from, for a tool that has no git to ask here: the wheel is of the same tree."""
    if day.commit is None:
        asked = subprocess.run(day.acromion("--version"), env=environment, capture_output=True, text=True, check=False)
        built = re.search(r"\(([0-9a-f]+)(, modified)?\)", asked.stdout)
        day.commit = {"ACR_GIT_SHA": built[1], "ACR_GIT_DIRTY": "1" if built[2] else "0"} if built else {}
    return day.commit


def environment_of(day):
    environment = dict(os.environ, ACROMION=str(day.place.program), ACROMION_SOURCE=str(day.place.root),
                       PYTHONUNBUFFERED="1")
    if day.nvcc():  # by the names that the program and the search know it by
        environment.update(ACR_NVCC=str(day.nvcc()), NVCC=str(day.nvcc()))
    libraries = [str(day.place.root)] if (day.place.root / "acromion").is_file() else []  # a bundle's own
    paths = libraries + [path for path in (os.environ.get("LD_LIBRARY_PATH"),) if path]
    if paths:
        environment["LD_LIBRARY_PATH"] = ":".join(paths)
    return environment | commit_of(day, environment)


def check_words(summary):
    """One line, and where cases failed the first of them."""
    cases, failed = (sum(kernel[field] for kernel in summary["kernels"]) for field in ("cases", "failed"))
    words = f"{len(summary['kernels'])} kernels, {cases} cases, {failed} failed"
    first = summary["failures"][:1]
    return words + "".join(f", the first: {record['kernel']}: {record['failure']}" for record in first)


IN_MORE = ("variants.json", "unseen.json")  # files of records in more.tar.gz


def records_file(day, name):
    if name not in IN_MORE:
        return day.out / name
    (day.scratch / "more").mkdir(exist_ok=True)
    return day.scratch / "more" / name


def keep(day, step, part, command, made, printed):
    """Puts what a command made into the day's files. Returns (what is wrong with it, or None; what to say of it)."""
    words = None
    try:
        if command.output == "records" and made.is_file():
            merge_records(records_file(day, command.into), read_json(made, []))
        elif command.output == "check" and printed.stat().st_size:
            asked = " ".join(map(str, command.argv[command.argv.index("--json") + 1:]))
            summary = check_summary(step.name, part, asked, json.loads(printed.read_text()))
            words = check_words(summary)
            merge_records(day.out / "check.json", [summary])
        elif command.output == "grid" and printed.stat().st_size:
            merge_records(records_file(day, command.into), json.loads(printed.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        return f"what it made cannot be read: {type(error).__name__}: {error}", None
    return None, words


def last_words(path):
    lines = pathlib.Path(path).read_text(errors="replace").splitlines()
    said = [line for line in lines if line and not line.startswith("$ ")]
    for words in (("FAIL", "REFUSED", "BAD "), ("acromion:", "rror")):
        blamed = [line for line in said if any(word in line for word in words)]
        if blamed:
            return blamed[-1].strip()[:200]
    return said[-1][:200] if said else "no output"


def run_command(day, step, part, command, limit_s, log):
    """Returns (status, why)."""
    made, printed = (day.scratch / f"{step.name}-{part}.{what}" for what in ("made.json", "printed"))
    argv = [str(word) for word in command.argv]
    if command.output == "records":
        argv += ["-o", str(made)]
    elif command.output == "wisdom":
        argv += ["-o", str(day.out / "gpu.wisdom")]
    elif command.output == "folder":
        folder = day.scratch / "more" / command.into
        folder.mkdir(parents=True, exist_ok=True)
        argv.append(str(folder))
    made.unlink(missing_ok=True)
    log.write(f"$ {' '.join(argv)}\n".encode())
    log.flush()
    to_file = command.output in ("check", "grid")
    with open(printed, "wb") as out:
        code = run_process(argv, limit_s, out if to_file else log, log, environment_of(day), day.place.root)
    with day.lock:
        wrong, words = keep(day, step, part, command, made, printed)
    if words:
        log.write((words + "\n").encode())
        log.flush()
    if code is None:
        return FAILED, f"killed after {limit_s:.0f} s"
    if code == EXIT_UNFINISHED:
        return UNFINISHED, "to be gone on with"
    if code in (EXIT_CANNOT_RUN, SKIPPED_TEST):
        return CANNOT, last_words(log.name)
    if code != DONE or wrong:
        return FAILED, wrong or f"exit code {code}: {last_words(log.name)}"
    return PASSED, None


def run_step(day, step, remaining_s):
    """Runs a step to its end and writes down what became of it."""
    started = time.monotonic()
    missing = step.lacks(day) if step.lacks else None
    log_path = day.scratch / f"{step.name}.log"
    status, why, limit_s = PASSED, None, min(limit_of(step), remaining_s)
    with open(log_path, "wb") as log:
        if missing:
            status, why = CANNOT, missing
            log.write((missing + "\n").encode())
        commands = [] if missing else list(step.commands(day))
        if not missing and not commands:
            why = "nothing to run is listed"
            log.write((why + "\n").encode())
        for part, command in enumerate(commands):
            left = limit_s - (time.monotonic() - started)
            outcome, reason = run_command(day, step, part, command, max(left, 0.1), log)
            if outcome != PASSED and status != FAILED:
                status, why = outcome, reason
    finish_step(day, step, status, why, time.monotonic() - started, log_path)
    return status


def finish_step(day, step, status, why, seconds, log_path):
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record = {"step": step.name, "status": status, "seconds": round(seconds, 1), "expected_s": step.seconds,
              "date": now, **({"why": why} if why else {}), **({"tiny": True} if day.tiny else {})}
    with day.lock:
        with open(day.out / "day.log", "ab") as log:
            log.write(f"==== {step.name}: {step.about}\n".encode() + log_path.read_bytes())
            log.write(f"==== {step.name}: {status} after {seconds:.0f} s, {now}\n\n".encode())
        merge_records(day.out / "day.json", [record])
        pack_more(day)
        print(f"{step.name:20} {status:16} {seconds:5.0f} s of {step.seconds:3d}  {why or ''}".rstrip(), flush=True)


def batches(chosen):
    """Steps that may run beside each other, as long as they follow each other; each of the others alone."""
    group = []
    for step in chosen:
        if not step.together and group:
            yield group
            group = []
        group.append(step)
        if not step.together:
            yield group
            group = []
    if group:
        yield group


def run_all(day, chosen, budget_s, jobs):
    """What became of each step."""
    began = time.monotonic()
    found = {}

    def one(step):
        left = budget_s - (time.monotonic() - began)
        if step.seconds > left:
            found[step.name] = UNRUN
            print(f"{step.name:20} {UNRUN:16} takes {step.seconds} s, {left:.0f} are left", flush=True)
        else:
            found[step.name] = run_step(day, step, left)

    for group in batches(chosen):
        with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
            for done in [pool.submit(one, step) for step in group]:
                done.result()
    return found


# ---- The command line ------------------------------------------------------------------------------------------------

def merge_folders(day, folders):
    for folder in map(pathlib.Path, folders):
        if not (folder / "day.json").is_file():
            sys.exit(f"gpu_day: {folder}: no day.json, so no day's output")
        for name in ("day.json", "bench.json", "profile.json", "check.json", "grid.json"):
            if (folder / name).is_file():
                merge_records(day.out / name, read_json(folder / name, []))
        if (folder / "day.log").is_file():
            with open(day.out / "day.log", "ab") as log:
                log.write((folder / "day.log").read_bytes())
        if (folder / "gpu.wisdom").is_file():
            subprocess.run(day.acromion("wisdom", "merge", str(folder / "gpu.wisdom"), "-o",
                                        str(day.out / "gpu.wisdom")), check=True)
        if (folder / "more.tar.gz").is_file():
            before = {name: read_json(records_file(day, name), []) for name in IN_MORE}
            unpack_more(day, folder / "more.tar.gz")
            for name in IN_MORE:
                if before[name]:
                    after = read_json(records_file(day, name), [])
                    write_json(records_file(day, name), before[name])
                    merge_records(records_file(day, name), after)
    pack_more(day)


def print_list(all_steps):
    print(f"{'step':20} {'expected':>9} {'limit':>6}  what")
    for step in all_steps:
        expected = f"{'' if step.known else '~'}{step.seconds} s"
        print(f"{step.name:20} {expected:>9} {limit_of(step):>4} s  {step.about}"
              f"{' (beside others)' if step.together else ''}")
    print(f"{'all, one by one':20} {sum(step.seconds for step in all_steps):>7} s; ~: a guess, never timed yet")


def choose(all_steps, names):
    if names == ["all"]:
        return all_steps
    unknown = [name for name in names if not any(name in (s.name, s.name.split(".")[0]) for s in all_steps)]
    if unknown:
        print(f"gpu_day: no step {' '.join(unknown)}; --list names them", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    return [s for s in all_steps if s.name in names or s.name.split(".")[0] in names]


def already_passed(folders):
    passed = set()
    for folder in folders:
        if folder.is_dir():
            passed |= {r["step"] for r in read_json(folder / "day.json", []) if r["status"] == PASSED}
    return passed


def exit_code_of(found):
    if FAILED in found:
        return EXIT_FAILED
    if CANNOT in found:
        return EXIT_CANNOT_RUN
    return EXIT_UNFINISHED if UNRUN in found or UNFINISHED in found else DONE


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="or all")
    parser.add_argument("-o", "--output", default="gpu-day", metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="print the steps and run none")
    parser.add_argument("--dry-run", action="store_true", help="print the commands of the steps and run none")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="S",
                        help="seconds; a step that is expected to take more than is left is not begun")
    parser.add_argument("--after", action="append", default=[], metavar="FOLDER",
                        help="of an earlier run: what passed there is not run again; may be repeated")
    parser.add_argument("--again", action="store_true", help="run also what has passed")
    parser.add_argument("--jobs", type=int, default=4, metavar="N",
                        help="steps beside each other, where nothing is timed; default 4")
    parser.add_argument("--tiny", action="store_true",
                        help="lists cut to their first entry: a rehearsal of the script, of no worth as a result")
    parser.add_argument("--merge", action="store_true", help="STEPs are folders: put what they hold into FOLDER")
    asked = parser.parse_args(arguments)
    if not asked.list and not asked.steps:
        parser.error("which steps? --list names them")
    if asked.jobs < 1:
        parser.error("--jobs: at least 1")
    return asked


def dry_run(day, chosen):
    for step in chosen:
        missing = step.lacks(day) if step.lacks else None
        print(f"{step.name}: {'cannot run here: ' + missing if missing else ''}")
        for command in [] if missing else step.commands(day):
            print("    " + " ".join(map(str, command.argv)))


def run_day(day, asked, all_steps):
    if asked.merge:
        day.out.mkdir(parents=True, exist_ok=True)
        merge_folders(day, asked.steps)
        return DONE
    chosen = choose(all_steps, asked.steps)
    if asked.dry_run:
        dry_run(day, chosen)
        return DONE
    if not day.place.program.is_file():
        print(f"gpu_day: {day.place.program}: no such program; ./run build or ./run bundle makes it", file=sys.stderr)
        return EXIT_CANNOT_RUN
    day.out.mkdir(parents=True, exist_ok=True)
    done = set() if asked.again else already_passed([day.out, *map(pathlib.Path, asked.after)])
    for step in chosen:
        if step.name in done:
            print(f"{step.name:20} passed before", flush=True)
    chosen = [step for step in chosen if step.name not in done]
    for folder in [*map(pathlib.Path, asked.after), day.out]:  # a search goes on from its store
        if (folder / "more.tar.gz").is_file():
            unpack_more(day, folder / "more.tar.gz")
    found = run_all(day, chosen, asked.budget, asked.jobs)
    counts = [f"{list(found.values()).count(status)} {status}"
              for status in (PASSED, FAILED, CANNOT, UNFINISHED, UNRUN)]
    print(f"{', '.join(counts)}; in {day.out}/")
    return exit_code_of(found.values())


def main():
    asked = parse(sys.argv[1:])
    all_steps = steps()
    if asked.list:
        print_list(all_steps)
        return DONE
    day = Day(Place(), pathlib.Path(asked.output).resolve(), asked.tiny)
    try:
        return run_day(day, asked, all_steps)
    finally:
        shutil.rmtree(day.scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
