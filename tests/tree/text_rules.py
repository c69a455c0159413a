#!/usr/bin/env python3
"""Rules about the text of the files that git tracks: no absolute paths of somebody's machine, lines of at most 120
columns (pages: 100), no tabs or trailing blanks, no functions that overflow or hide errors, and no printing or exiting inside the
library."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = {".c", ".h", ".cu", ".cuh", ".cpp", ".py", ".sh", ".cmake"}
C_FAMILY = {".c", ".h", ".cu", ".cuh", ".cpp"}
COLUMNS_MAX = 120
PAGE_COLUMNS_MAX = 100  # of prose; tables, code, headings and the addresses of links apart
FAMILY_PAGE_LINES_MAX = 120  # of a family's README; what was tried is in its lab.md

# Pattern, which files it applies to, and what is wrong.
RULES = [
    (re.compile(r"(?<![\w.])/(?:work|root|home/\w+|mnt|Users)/"), lambda p: True, "an absolute path of one machine"),
    (re.compile(r"\b(?:strcpy|strcat|sprintf|vsprintf|strtok|atoi|atol|atof|gets)\s*\("),
     lambda p: p.suffix in C_FAMILY,
     "a banned function: it overflows, or takes errors for numbers"),
    (re.compile(r"\b(?:printf|puts|putchar|exit|_exit|abort|assert)\s*\("),
     lambda p: p.parts[0] == "src" and p.suffix in C_FAMILY,
     "the library neither prints nor exits"),
    (re.compile(r"\b(?:getenv|setenv|putenv|environ)\b"),
     lambda p: p.parts[0] == "src" and p.suffix in C_FAMILY and p.as_posix() != "src/cuda/driver.c",
     "the library reads no environment, but for ACR_FORCE_PTX in src/cuda/driver.c"),
    (re.compile(r"\t"), lambda p: p.suffix in CODE | {".txt", ".md"}, "a tab"),
    (re.compile(r"[ \t]+$"), lambda p: p.suffix in CODE, "blanks at the end of the line"),
    (re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"), lambda p: p.suffix in CODE, "unfinished business: better an issue"),
]
THIS = pathlib.PurePosixPath("tests/tree/text_rules.py")


def strip_comments(text):
    """C without its comments and string literals, lines kept: what the rules about functions look at."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)


def long_lines_of_page(text):
    """(number, columns) of each line of prose that is too long."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if fenced or line.startswith(("    ", "#", "<")) or line.lstrip().startswith("|"):
            continue
        columns = len(re.sub(r"\]\([^)]*\)", "]()", line))
        if columns > PAGE_COLUMNS_MAX and " " in line.strip():
            yield number, columns


def tracked_files():
    """Those that git tracks or would add; without git, those of a source archive."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if listed.returncode == 0:
        names = listed.stdout.decode().split("\0")
    else:
        names = [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*")]
        names = [name for name in names if not name.startswith(("build", "dist", "."))]
    return [pathlib.PurePosixPath(name) for name in names if name and (ROOT / name).is_file()]


def check(path):
    try:
        text = (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        if path.parts[0] == "results" and path.suffix == ".gz":  # long records, packed
            return []
        return [] if path.parts[:2] == ("tests", "fuzz") else [f"{path}: not UTF-8 text"]
    if path == THIS or path.parts[:2] == ("tests", "fuzz") and path.parts[2].startswith("corpus_"):
        return []
    found = []
    if path.suffix == ".md":
        found += [f"{path}:{number}: {columns} columns, at most {PAGE_COLUMNS_MAX} in a page"
                  for number, columns in long_lines_of_page(text)]
    if path.parts[0] == "src" and path.name == "README.md" and text.count("\n") > FAMILY_PAGE_LINES_MAX:
        found.append(f"{path}: {text.count(chr(10))} lines, at most {FAMILY_PAGE_LINES_MAX}")
    bare = strip_comments(text) if path.suffix in C_FAMILY else text
    for number, (line, code) in enumerate(zip(text.split("\n"), bare.split("\n")), 1):
        if (path.suffix in CODE or path.name == "CMakeLists.txt") and len(line) > COLUMNS_MAX:
            found.append(f"{path}:{number}: {len(line)} columns, at most {COLUMNS_MAX}")
        for pattern, applies, wrong in RULES:
            subject = code if "function" in wrong or "library" in wrong else line
            if applies(path) and pattern.search(subject):
                found.append(f"{path}:{number}: {wrong}")
    if text and not text.endswith("\n") and path.suffix in CODE:
        found.append(f"{path}: no newline at the end")
    return found


def main():
    files = tracked_files()
    found = [line for path in files for line in check(path)]
    print("\n".join(found))
    print(f"{len(files)} files, {len(found)} lines that break a rule")
    return 1 if found or len(files) < 20 else 0


if __name__ == "__main__":
    sys.exit(main())
