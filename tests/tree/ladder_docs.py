#!/usr/bin/env python3
"""The predictions of src/cuda/kernels/ladder/README.md's tables and those that `acromion bench` prints next to the
ladder's gains (workbench/bench/ladder.c) are the same."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROW = re.compile(r'\{"(?P<problem>[^"]+)", \{(?P<us>[^}]+)\}\}')


def program_says():
    text = (ROOT / "workbench/bench/ladder.c").read_text()
    return {row["problem"]: [float(us) for us in row["us"].split(",")] for row in ROW.finditer(text)}


def column(lines, heading):
    """The numbers under a heading of a Markdown table."""
    titles = [cell.strip() for cell in lines[0].strip("|").split("|")]
    place = titles.index(heading)
    return [float(line.strip("|").split("|")[place]) for line in lines[2:]]


def document_says():
    """The tables whose heading has predictions, in order: the mission shape's, then the large one's."""
    text = (ROOT / "src/cuda/kernels/ladder/README.md").read_text()
    tables = [t.splitlines() for t in re.findall(r"(?:^\|.*\n)+", text, re.M) if "full predicted" in t]
    problems = ("b2:h8:s512:d64", "b4:h16:s2048:d64")
    if len(tables) != len(problems):
        sys.exit(f"src/cuda/kernels/ladder/README.md has {len(tables)} tables with predictions, not {len(problems)}")
    said = {}
    for problem, lines in zip(problems, tables):
        said[problem] = column(lines, "full predicted")
        said[problem + ":causal"] = column(lines, "causal predicted")
    return said


def main():
    program, document = program_says(), document_says()
    if program != document:
        sys.exit(f"workbench/bench/ladder.c: {program}\nladder/README.md: {document}")
    print(f"{len(program)} columns of predictions agree")


if __name__ == "__main__":
    main()
