#!/usr/bin/env python3
"""Runs the commands of pages that promise a result in five: pages.py [--last] PAGE...

The commands are the lines of a page's first block of `sh`, at most five, run one after another by one shell in the
tree's root. The first is left out: it brings the tree. With --last only the last runs: the others have been replaced by
what CI has already."""
import pathlib
import re
import subprocess
import sys

MOST = 5


def commands(page):
    block = re.search(r"^```sh\n(.*?)^```$", pathlib.Path(page).read_text(), re.MULTILINE | re.DOTALL)
    lines = block[1].splitlines() if block else []
    if not 2 <= len(lines) <= MOST or not lines[0].startswith("git clone"):
        sys.exit(f"{page}: a block of sh has {len(lines)} lines; wanted are git clone and up to {MOST - 1} more")
    return lines


def main():
    pages = [argument for argument in sys.argv[1:] if argument != "--last"]
    if not pages:
        sys.exit(__doc__)
    for page in pages:
        wanted = commands(page)[-1:] if "--last" in sys.argv else commands(page)[1:]
        print(f"{page}: {len(wanted)} commands", flush=True)
        done = subprocess.run(["bash", "-euo", "pipefail", "-x", "-c", "\n".join(wanted)])
        if done.returncode != 0:
            sys.exit(f"{page}: a command failed (above)")


if __name__ == "__main__":
    main()
