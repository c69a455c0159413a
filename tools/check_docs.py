#!/usr/bin/env python3
"""Checks what the documents point to, and takes their programs out so that the build can try them.

    check_docs.py                      every relative link leads to a file, every #fragment to a heading; the pages and
                                       tools that ./run names are there
    check_docs.py --block LANGUAGE DOCUMENT    prints the document's first fenced block of that language"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w./-])(?:docs|integrations|ptxvm|search|src|tests|tools)/[\w./-]+\.(?:md|py|sh|txt)\b")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def documents():
    rooms = ("docs", "src", "integrations", "ptxvm", "wisdom", "results")
    return [*sorted(ROOT.glob("*.md")), *sorted(page for room in rooms for page in (ROOT / room).rglob("*.md"))]


def anchors(path):
    """The fragments that a document's headings give: lower case, words joined by dashes, punctuation dropped."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links():
    for path in documents():
        for link in LINK.findall(FENCED.sub("", path.read_text())):
            target, _, fragment = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            found = (path.parent / target).resolve() if target else path
            if not found.exists():
                yield f"{path.relative_to(ROOT)}: no such file: {link}"
            elif fragment and fragment not in anchors(found):
                yield f"{path.relative_to(ROOT)}: no such heading: {link}"
    for name in sorted(set(NAMED.findall((ROOT / "run").read_text()))):
        if not (ROOT / name).exists():
            yield f"run: no such file: {name}"


def block(language, document):
    match = re.search(rf"^```{language}\n(.*?)^```$", pathlib.Path(document).read_text(), re.MULTILINE | re.DOTALL)
    if not match:
        sys.exit(f"{document}: no block of {language}")
    return match[1]


def main():
    if sys.argv[1:2] == ["--block"] and len(sys.argv) == 4:
        sys.stdout.write(block(*sys.argv[2:]))
    elif len(sys.argv) == 1:
        broken = list(broken_links())
        if broken:
            sys.exit("\n".join(broken))
        print(f"{len(documents())} documents, every link leads somewhere")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
