#!/usr/bin/env python3
"""Runs a command while other processes hold the GPU with kernels that never end, so that the GPU leaves each of the
command's kernels halfway and comes back to it: what kernels leave in flight then shows
(src/cuda/kernels/bwd_wgmma/lab.md, "A number that was lost").

    beside.py [-n PROCESSES] [--limit SECONDS] -- COMMAND...
    beside.py -- acromion check -k 'bwd_wgmma*_pair*' --reruns 30 bwd:bf16:b1:h8:s2048:d128

Exit code: the command's; 4 without nvcc, or if a process cannot hold the GPU; 124 if the command ran past the limit and
was ended."""
import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

EXIT_CANNOT_RUN, EXIT_TIMED_OUT = 4, 124

# One thread is enough: a process has the GPU, or another has it.
SOURCE = r"""
#include <cstdio>
__global__ void spin(volatile int *stop)
{
    while (*stop == 0)
        ;
}
int main()
{
    int *stop;
    if (cudaMalloc(&stop, 4) != cudaSuccess || cudaMemset(stop, 0, 4) != cudaSuccess)
        return 1;
    spin<<<1, 1>>>(stop);
    if (cudaGetLastError() != cudaSuccess)
        return 1;
    std::puts("running");
    std::fflush(stdout);
    return cudaDeviceSynchronize() != cudaSuccess;
}
"""


def start(program):
    """A process that holds the GPU, or None."""
    process = subprocess.Popen([program], stdout=subprocess.PIPE, text=True)
    if process.stdout.readline().strip() == "running":
        return process
    process.kill()
    process.wait()
    return None


def run(command, limit):
    try:
        return subprocess.run(command, timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"beside.py: ended after {limit} s: {' '.join(command)}", file=sys.stderr)
        return EXIT_TIMED_OUT


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=3, help="processes; default 3")
    parser.add_argument("--limit", type=float, default=120, help="seconds for the command; default 120")
    parser.add_argument("--nvcc", default="nvcc", help="the compiler; default: that on PATH")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    nvcc = shutil.which(asked.nvcc)
    if not nvcc:
        print(f"beside.py: {asked.nvcc}: no such compiler", file=sys.stderr)
        return EXIT_CANNOT_RUN
    with tempfile.TemporaryDirectory(prefix="acromion-beside-") as folder:
        source, program = pathlib.Path(folder, "spin.cu"), pathlib.Path(folder, "spin")
        source.write_text(SOURCE)
        if subprocess.run([nvcc, "-o", program, source], check=False).returncode != 0:
            print(f"beside.py: {nvcc} cannot compile the kernel that holds the GPU", file=sys.stderr)
            return EXIT_CANNOT_RUN
        holding = []
        try:
            for _ in range(asked.n):
                holding.append(start(program))
                if holding[-1] is None:
                    print("beside.py: a process cannot hold the GPU", file=sys.stderr)
                    return EXIT_CANNOT_RUN
            return run(asked.command, asked.limit)
        finally:
            for process in filter(None, holding):
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
