#!/usr/bin/env python3
"""Runs the Python blocks of a document, each section's as one program: run_docs.py [--without-torch] DOCUMENT"""
import pathlib
import re
import subprocess
import sys


def programs(text):
    """(heading, program) for each section that has one."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        if blocks:
            yield section.split("\n", 1)[0], "\n".join(blocks)


def main():
    without_torch = "--without-torch" in sys.argv
    ran = 0
    for heading, program in programs(pathlib.Path(sys.argv[-1]).read_text()):
        if without_torch and "import torch" in program:
            continue
        print(f"section {heading}", flush=True)
        done = subprocess.run([sys.executable, "-c", program])
        if done.returncode != 0:
            sys.exit(f"{sys.argv[-1]}: the program of section {heading} failed")
        ran += 1
    if ran == 0:
        sys.exit(f"{sys.argv[-1]}: no Python block")


if __name__ == "__main__":
    main()
