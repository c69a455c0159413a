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

# A group: which GPU, how many SMs (few, so that persistent kernels have several tiles each), which kernels, and the
# problems that each of them gets if it can run them.
GROUPS = {
    "simt": [
        (90, 4, "fwd_simt", [LATE, EAGER], ["f32:b1:h2:s70/90:d64:causal:lse"]),
    ],
}


def environment(driver, images, arch, sms, order):
    seed, eager = order
    return {"LD_LIBRARY_PATH": driver, "FAKE_CUDA_EXECUTE": images, "FAKE_CUDA_ARCH": str(arch),
            "FAKE_CUDA_SMS": str(sms), "FAKE_CUDA_SEED": seed, "FAKE_CUDA_EAGER": eager}


def check(program, chosen, kernels, problems, inputs="normal"):
    """Runs `acromion check`; returns what became of it and the command."""
    command = [program, "check", "--backend", "cuda", "--threads", "2", "-k", kernels, "--inputs", inputs, *problems]
    done = subprocess.run(command, env={**os.environ, **chosen}, cwd=ROOT, capture_output=True, text=True)
    shown = " ".join([*(f"{name}={value}" for name, value in chosen.items()), *command])
    return done, shown


def run_group(program, driver, images, name):
    failures = 0
    for arch, sms, kernels, orders, problems in GROUPS[name]:
        for order in orders:
            began = time.monotonic()
            done, shown = check(program, environment(driver, images, arch, sms, order), kernels, problems)
            summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
            passed = re.search(r"(\d+) cases passed, 0 failed", summary)
            if done.returncode != 0 or not passed or int(passed.group(1)) == 0:
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
