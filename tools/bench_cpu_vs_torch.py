#!/usr/bin/env python3
"""Measures the CPU backend against PyTorch's scaled_dot_product_attention, and both against the processor's
multiply-add peak.

    ./run build                                                     # build/libacromion.so
    python3 -m venv ~/.cache/acromion-torch && ~/.cache/acromion-torch/bin/pip install torch numpy
    ~/.cache/acromion-torch/bin/python tools/bench_cpu_vs_torch.py  # prints a table, writes results/<cpu>-<date>.json

Everything runs in one process, in blocks of four turns: ours, torch, torch, ours. A turn is one unmeasured call and a
few measured ones; between turns the threads of both sides are given time to fall asleep. The figure that counts is the
median over blocks of the ratio of a block's medians. The two turns of ours within a block, compared with each other,
give the noise: a control that must be 1."""
import argparse
import ctypes
import datetime
import json
import math
import os
import pathlib
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETTLE_S = 0.004  # longer than either side's idle threads spin
TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


# ---- our side: the public C API ----

class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("device", ctypes.c_int32), ("backend", ctypes.c_char_p),
                ("threads", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("parallel_for", ctypes.c_void_p),
                ("parallel_user", ctypes.c_void_p)]


class Buffers(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("q", ctypes.c_void_p), ("k", ctypes.c_void_p),
                ("v", ctypes.c_void_p), ("o", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("kv_lens", ctypes.c_void_p)]


class Acromion:
    """A context of the CPU backend."""

    PROBLEM_BYTES = 512  # more than acr_problem has; the library fills its part
    WORKSPACE_ALIGNMENT = 256

    def __init__(self, library, threads):
        self.library = ctypes.CDLL(str(library))
        for name in ("acr_last_error", "acr_plan_kernel", "acr_ctx_device"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.acr_plan_workspace.restype = ctypes.c_size_t
        self.context = ctypes.c_void_p()
        options = Options(size=ctypes.sizeof(Options), backend=b"cpu", threads=threads)
        self.checked(self.library.acr_ctx_create(ctypes.byref(self.context), ctypes.byref(options)))
        self.device = self.library.acr_ctx_device(self.context).decode()

    def checked(self, status):
        if status != 0:
            raise RuntimeError(self.library.acr_last_error().decode())

    def plan(self, problem, q, k, v, o):
        """(kernel's name, function that executes it once)."""
        parsed, plan = ctypes.create_string_buffer(self.PROBLEM_BYTES), ctypes.c_void_p()
        self.checked(self.library.acr_problem_parse(parsed, problem.encode(), None))
        self.checked(self.library.acr_plan_create(ctypes.byref(plan), self.context, parsed, 0))
        bytes_needed = self.library.acr_plan_workspace(plan)
        memory = ctypes.create_string_buffer(bytes_needed + self.WORKSPACE_ALIGNMENT)
        address = -(-ctypes.addressof(memory) // self.WORKSPACE_ALIGNMENT) * self.WORKSPACE_ALIGNMENT
        buffers = Buffers(size=ctypes.sizeof(Buffers), q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), o=o.data_ptr())
        execute, workspace, size = self.library.acr_execute, ctypes.c_void_p(address), ctypes.c_size_t(bytes_needed)
        buffers_at, keep = ctypes.byref(buffers), (memory, q, k, v, o)

        def run():
            assert keep
            self.checked(execute(plan, buffers_at, workspace, size, None))

        return self.library.acr_plan_kernel(plan).decode(), run


# ---- the peak ----

class Peak:
    """Float32 multiply-adds a second that `threads` threads reach together, from tools/fma_peak.c."""

    ROUNDS = 4_000_000

    def __init__(self, threads):
        self.threads = threads
        with tempfile.TemporaryDirectory() as folder:
            built = pathlib.Path(folder) / "fma_peak.so"
            subprocess.run([os.environ.get("CC", "cc"), "-O2", "-march=native", "-ffp-contract=fast", "-shared",
                            "-fPIC", str(ROOT / "tools/fma_peak.c"), "-o", str(built)], check=True)
            self.burst = ctypes.CDLL(str(built)).fma_burst
        self.burst.restype, self.burst.argtypes = ctypes.c_double, [ctypes.c_long]

    def once(self):
        bursts = [None] * self.threads  # (start, end, operations) of each thread
        start_together = threading.Barrier(self.threads)

        def work(index):
            start_together.wait()
            start = time.perf_counter()
            operations = self.burst(self.ROUNDS)  # ctypes releases the interpreter lock
            bursts[index] = start, time.perf_counter(), operations

        workers = [threading.Thread(target=work, args=(i,)) for i in range(self.threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        starts, ends, operations = zip(*bursts)
        return sum(operations) / (max(ends) - min(starts))

    def best_of(self, times):
        return max(self.once() for _ in range(times))


# ---- measuring ----

def turn(run, calls):
    """Seconds of each of `calls` calls, after one that is not counted."""
    time.sleep(SETTLE_S)
    run()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def bootstrap(values, statistic, rng, rounds=1000):
    """95 % interval of a statistic over resampled values."""
    found = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(rounds))
    return [found[int(0.025 * rounds)], found[int(0.975 * rounds)]]


def summary(turns, rng):
    """The schema's figures of one side; the interval resamples whole blocks."""
    calls = sorted(s for block in turns for s in block)

    def quantile(share):
        return calls[min(len(calls) - 1, math.ceil(share * len(calls)) - 1)] * 1e6

    def median_us(blocks):
        return statistics.median(s for block in blocks for s in block) * 1e6

    low, high = bootstrap(turns, median_us, rng)
    p50 = quantile(0.50)
    return {"p50_us": p50, "p90_us": quantile(0.90), "p99_us": quantile(0.99), "n": len(calls),
            "ci95_us": [min(low, p50), max(high, p50)]}


def ratio(blocks_over, blocks_under, rng):
    """Median over blocks of over / under, with its 95 % interval."""
    logs = [math.log(statistics.median(over) / statistics.median(under))
            for over, under in zip(blocks_over, blocks_under)]
    return math.exp(statistics.median(logs)), [math.exp(x) for x in bootstrap(logs, statistics.median, rng)]


def parse(problem):
    """(dtype, batch, heads, length, dim, causal) of the problems this script knows."""
    fields = problem.split(":")
    number = {f[0]: int(f[1:]) for f in fields if re.fullmatch(r"[bhsd]\d+", f)}
    dtype = next((f for f in fields if f in TYPES), "f16")
    known = set(TYPES) | {"causal", "fwd"}
    unknown = [f for f in fields if f not in known and not re.fullmatch(r"[bhsd]\d+", f)]
    if sorted(number) != ["b", "d", "h", "s"] or unknown:
        sys.exit(f"{problem}: this script knows DTYPE:bN:hN:sN:dN[:causal]")
    return dtype, number["b"], number["h"], number["s"], number["d"], "causal" in fields


def measure(torch, ours, peak_flops, problem, args):
    """Two records, ours and torch's."""
    dtype, batch, heads, length, dim, causal = parse(problem)
    torch.manual_seed(args.seed)
    q, k, v = (torch.randn(batch, heads, length, dim, dtype=torch.float32).to(getattr(torch, TYPES[dtype]))
               for _ in range(3))
    o = torch.empty_like(q)
    kernel, run_ours = ours.plan(problem, q, k, v, o)
    attention, kept = torch.nn.functional.scaled_dot_product_attention, {}

    def run_torch():
        kept["o"] = attention(q, k, v, is_causal=causal)

    # err_max, against float64 on the same inputs
    run_ours(), run_torch()
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(dim)
    if causal:
        scores.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    expected = torch.softmax(scores, -1) @ v.double()
    errors = [float((result.double() - expected).abs().max()) for result in (o, kept["o"])]

    turns = {"ours_first": [], "torch_first": [], "torch_last": [], "ours_last": []}
    for _ in range(args.blocks):
        for name, run in zip(turns, (run_ours, run_torch, run_torch, run_ours)):
            turns[name].append(turn(run, args.calls))
    rng = random.Random(args.seed)
    ours_turns = [a + b for a, b in zip(turns["ours_first"], turns["ours_last"])]
    torch_turns = [a + b for a, b in zip(turns["torch_first"], turns["torch_last"])]
    speedup, speedup_ci95 = ratio(torch_turns, ours_turns, rng)
    control, control_ci95 = ratio(turns["ours_first"], turns["ours_last"], rng)

    flops = 4.0 * batch * heads * length * length * dim * (0.5 if causal else 1.0)
    common = {"problem": problem.removeprefix("f16:"), "mode": "call", "overlap": False, "threads": args.threads}
    comparison = {"speedup_over_torch": speedup, "speedup_over_torch_ci95": speedup_ci95,
                  "control_ratio": control, "control_ratio_ci95": control_ci95}
    peer = f"pytorch {torch.__version__} scaled_dot_product_attention"
    records = [common | {"kernel": kernel} | summary(ours_turns, rng) | {"err_max": errors[0]} | comparison,
               common | {"peer": peer} | summary(torch_turns, rng) | {"err_max": errors[1]}]
    for record in records:
        record["fma_peak_share"] = flops / (record["p50_us"] * 1e-6) / peak_flops
    return records


# ---- the report ----

def git(*words):
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


def clock_mhz():
    if platform.system() != "Linux":
        return None
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    return float(found.group(1)) if found else None


def show(records, peak_flops):
    print(f"multiply-add peak, measured: {peak_flops * 1e-9:.0f} GFLOP/s")
    for mine, peer in zip(records[::2], records[1::2]):
        print(mine["problem"])
        for name, record in ((mine["kernel"], mine), ("torch", peer)):
            print(f"  {name:44} p50 {record['p50_us']:9.1f} us  p90 {record['p90_us']:9.1f}  "
                  f"{record['fma_peak_share']:5.1%} of the peak  error {record['err_max']:.1e}")
        low, high = mine["speedup_over_torch_ci95"]
        print(f"  {mine['speedup_over_torch']:.2f} times as fast as torch "
              f"(95 % interval {low:.2f} to {high:.2f}; control {mine['control_ratio']:.3f})")


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("problems", nargs="*", default=["f32:b2:h8:s512:d64", "f32:b1:h16:s2048:d64"])
    words.add_argument("--library", type=pathlib.Path, default=ROOT / "build/libacromion.so")
    words.add_argument("--threads", type=int, default=2)
    words.add_argument("--blocks", type=int, default=40)
    words.add_argument("--calls", type=int, default=8, help="measured calls a turn")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--out", type=pathlib.Path, help="default: results/<cpu>-<date>.json; - writes none")
    args = words.parse_args()

    import torch  # late, so that --help needs none
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    ours, peak = Acromion(args.library, args.threads), Peak(args.threads)
    clocks = {"cpu_mhz_before": clock_mhz()}
    before = peak.best_of(10)
    records = [record for problem in args.problems for record in measure(torch, ours, before, problem, args)]
    after = peak.best_of(10)
    peak_flops = max(before, after)
    clocks["cpu_mhz_after"] = clock_mhz()
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    device = ours.device.split(",")[0]
    for record in records:
        record["fma_peak_share"] *= before / peak_flops
        record |= {"fma_peak_gflops": peak_flops * 1e-9, "device": device, "driver": "none", "clocks": clocks,
                   "git_sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain")),
                   "seeds": {"inputs": args.seed}, "date": now}
    show(records, peak_flops)
    if str(args.out) != "-":
        name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        out = args.out or ROOT / "results" / f"{name}-{now[:10]}.json"
        out.write_text(json.dumps(records, indent=1) + "\n")
        print(f"written: {out}")


if __name__ == "__main__":
    main()
