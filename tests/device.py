#!/usr/bin/env python3
"""Device code on the CPU: `acromion check` over the fake driver, whose launches the PTX machine executes.

    device.py PROGRAM FAKE_DRIVER_FOLDER IMAGES GROUP     one of GROUPS below
    device.py PROGRAM FAKE_DRIVER_FOLDER IMAGES flaws     kernels with a fault made into them must fail

A failure prints the command that repeats it, its environment included."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Asynchronous work late or at once, with an order of warps of its own.
LATE, LATE_TOO, EAGER = ("1", "0"), ("7", "0"), ("2", "1")

# How long problems of these kernels may be: whole tiles, and tails of them.
SHAPES = ["b1:h2:s70/130:d{d}:causal:lse", "b2:h4/2:s65/97:d{d}:kvlens", "b1:h2:s33:d{d}:causal-tl:bshd",
          "b3:h2:s70/50:d{d}:causal:bshd:packed", "b1:h4/1:s1/200:d{d}"]
LONG = ["b1:h2:s200/300:d{d}:causal:lse", "b2:h2/1:s260/129:d{d}:kvlens", "b3:h2:s150/170:d{d}:bshd:packed:lse"]
DECODING = ["b2:h8/2:s1/300:d{d}:lse:kvlens", "b1:h4/1:s5/513:d{d}:causal", "b1:h2:s17/70:d{d}:causal-tl:bshd"]


def problems(shapes, dims, dtypes=("f16", "bf16")):
    return [f"{dtype}:{shape.format(d=d)}" for dtype in dtypes for d in dims for shape in shapes]


# A group: which GPU, how many SMs (few, so that persistent kernels have several tiles each), which kernels, in which
# orders, and the problems that each of them gets if it can run them.
GROUPS = {
    "simt": [(90, 4, "fwd_simt_f32_*", [LATE, EAGER], problems(SHAPES, [40, 128], ["f32"])),
             (80, 4, "fwd_simt_*16_*", [LATE], problems(SHAPES, [72, 256])),
             (89, 4, "fwd_simt_e4m3_*", [LATE], problems(SHAPES, [64], ["e4m3", "e4m3:of16"]))],
    "ladder": [(80, 4, "fwd_ladder0_*", [LATE], problems(SHAPES, [64], ["f16"])),
               (80, 4, "fwd_ladder*_64x64_*", [LATE, LATE_TOO, EAGER], problems(SHAPES + LONG, [64], ["f16"]))],
    "split": [(arch, 8, "fwd_split", orders, problems(DECODING + SHAPES, [64, 128]))
              for arch, orders in ((80, [LATE, EAGER]), (90, [LATE_TOO]))] +
             [(89, 8, "fwd_split_*_16x*", [LATE], problems(DECODING, [64, 192]))],
    "wgmma": [(90, 2, f"fwd_wgmma_*_d{d}_*", orders, problems(SHAPES + LONG, [d]))
              for d, orders in ((64, [LATE, LATE_TOO, EAGER]), (96, [LATE]), (128, [LATE, EAGER]), (256, [LATE]))] +
             [(90, 2, "fwd_wgmma_*_d192_*", [LATE], problems(SHAPES, ["192", "192/128"]))],
    "short": [(90, 4, "fwd_short_*_d64_*", [LATE, EAGER], problems(SHAPES + LONG, [64])),
              (90, 4, "fwd_short_*_d128_*", [LATE_TOO, EAGER], problems(SHAPES + LONG, [128]))],
    "fp8": [(90, 2, f"fwd_fp8_*_d{d}_*", [LATE, LATE_TOO, EAGER],
             problems(SHAPES + LONG, [d], ["e4m3", "e4m3:obf16"])) for d in (64, 128)],
    "mma": [(arch, 4, f"fwd_mma_*_d{d}_*", orders, problems(SHAPES, [d]))
            for arch, orders in ((80, [LATE, EAGER]), (89, [LATE]), (90, [LATE_TOO])) for d in (32, 64, 96, 128)] +
           [(arch, 4, f"fwd_mma_*_d{d}_*", [LATE], problems(SHAPES, [d])) for arch in (80, 89) for d in (192, 256)],
}


def environment(driver, images, arch, sms, order):
    seed, eager = order
    return {"LD_LIBRARY_PATH": driver, "FAKE_CUDA_EXECUTE": images, "FAKE_CUDA_ARCH": str(arch),
            "FAKE_CUDA_SMS": str(sms), "FAKE_CUDA_SEED": seed, "FAKE_CUDA_EAGER": eager}


def check(program, chosen, kernels, asked, inputs="normal"):
    """Runs `acromion check`; returns what became of it and the command."""
    command = [program, "check", "--backend", "cuda", "--threads", "2", "-k", kernels, "--inputs", inputs, *asked]
    done = subprocess.run(command, env={**os.environ, **chosen}, cwd=ROOT, capture_output=True, text=True)
    shown = " ".join([*(f"{name}={value}" for name, value in chosen.items()), *command])
    return done, shown


def run_group(program, driver, images, name):
    failures = 0
    for arch, sms, kernels, orders, asked in GROUPS[name]:
        for order in orders:
            began = time.monotonic()
            done, shown = check(program, environment(driver, images, arch, sms, order), kernels, asked)
            summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
            passed = re.search(r"(\d+) cases passed, 0 failed", summary)
            if done.returncode != 0 or not passed or "not run" in done.stdout:
                failures += 1
                print(f"FAILED: {shown}\n{done.stdout}{done.stderr}", flush=True)
            print(f"sm_{arch} {kernels} seed {order[0]} eager {order[1]}: {summary}; "
                  f"{time.monotonic() - began:.1f} s", flush=True)
    return failures


def main():
    program, driver, images, name = sys.argv[1:5]
    return 1 if run_group(program, driver, images, name) else 0


if __name__ == "__main__":
    sys.exit(main())
