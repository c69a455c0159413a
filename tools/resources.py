#!/usr/bin/env python3
"""Tabulates what ptxas said of every device image: registers, shared memory, spills. Usage: resources.py FOLDER

The folder holds *.ptxas. Dynamic shared memory is a launch's choice and not in them. The build itself fails on spills
(cmake/compile_image.sh); this table is for reading."""
import pathlib
import re
import signal
import sys

ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SMEM = re.compile(r"(\d+) bytes smem")
HEADINGS = ("kernel", "sm", "registers", "static smem", "stack", "spilled")


def rows_of(log):
    """One row for each architecture that the log of an image mentions."""
    kernel = log.name.removesuffix(".bin.ptxas")
    arch = stack = spilled = None
    for line in log.read_text().splitlines():
        if match := ENTRY.search(line):
            arch = match[2]
        elif match := STACK.search(line):
            stack, spilled = int(match[1]), int(match[2]) + int(match[3])
        elif match := USED.search(line):
            smem = SMEM.search(line)
            yield kernel, arch, int(match[1]), int(smem[1]) if smem else 0, stack, spilled


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `./run resources | head` ends quietly
    if len(sys.argv) != 2:
        sys.exit("usage: resources.py FOLDER")
    logs = sorted(pathlib.Path(sys.argv[1]).glob("*.bin.ptxas"))
    rows = [row for log in logs for row in rows_of(log)]
    if not rows:
        sys.exit(f"resources: no ptxas logs in {sys.argv[1]}: ./run build")
    table = [HEADINGS, *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADINGS))]
    for row in table:
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    main()
