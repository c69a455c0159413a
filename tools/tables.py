#!/usr/bin/env python3
"""Writes the tables of the documents from results/: what stands between `<!-- table:NAME -->` and `<!-- /table -->`.

    tables.py            rewrites the documents
    tables.py --check    changes nothing; exit code 1 when a document and results/ disagree"""
import difflib
import pathlib
import re
import sys

import results

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- table:([a-z0-9-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
MISSION = "b2:h8:s512:d64"
EMPTY = "*(no result in results/ yet)*\n"


def markdown(headings, rows):
    if not rows:
        return EMPTY
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def newest(records, key):
    """Of the records with the same key only the latest."""
    latest = {}
    for record in sorted(records, key=lambda r: r["date"]):
        latest[key(record)] = record
    return list(latest.values())


def subject(record):
    return record.get("kernel") or record["peer"]


def link(record):
    return f"[{record['date'][:10]}](results/{record['file']})"


def on_gpu(record):
    return record["driver"] != "none"


def mission_gpu(records):
    """The mission shape on GPUs, stream mode: the fastest kernel of each family of ours, and the peers; by time."""
    chosen = [r for r in records if r["problem"] == MISSION and r["mode"] == "stream" and on_gpu(r)]
    chosen = newest(chosen, lambda r: (r["device"], subject(r), r["overlap"]))
    fastest = {}
    for r in sorted(chosen, key=lambda r: -r["p50_us"]):
        fastest[(r["device"], r["overlap"], r.get("peer") or "_".join(r["kernel"].split("_")[:2]))] = r
    chosen = list(fastest.values())
    chosen.sort(key=lambda r: (r["device"], r["p50_us"]))
    rows = [
        (
            r["device"],
            f"`{subject(r)}`" + (" overlapped" if r["overlap"] else ""),
            f"{r['p50_us']:.2f}",
            f"{r['p99_us']:.2f}",
            r["n"],
            "" if r["err_max"] is None else f"{r['err_max']:.1e}",
            link(r),
        )
        for r in chosen
    ]
    return markdown(("GPU", "kernel", "p50 µs", "p99 µs", "n", "max error", "result"), rows)


def cpu_pytorch(records):
    """Ours against PyTorch on CPUs: what tools/bench_cpu_vs_torch.py recorded, with the speed-up within its run."""
    ours = newest([r for r in records if "speedup_over_torch" in r], lambda r: (r["device"], r["problem"]))
    ours.sort(key=lambda r: (r["device"], r["problem"]))
    rows = []
    for r in ours:
        peer = next(p for p in records if "peer" in p and (p["file"], p["problem"]) == (r["file"], r["problem"]))
        low, high = r["speedup_over_torch_ci95"]
        rows.append(
            (
                r["device"],
                f"`{r['problem']}`",
                f"{r['p50_us']:.0f}",
                f"{r['fma_peak_share']:.0%}",
                f"{peer['p50_us']:.0f}",
                f"{r['speedup_over_torch']:.2f} ({low:.2f} to {high:.2f})",
                link(r),
            )
        )
    headings = (
        "CPU",
        "problem",
        "acromion p50 µs",
        "share of FMA peak",
        "PyTorch p50 µs",
        "times as fast (95 %)",
        "result",
    )
    return markdown(headings, rows)


def gpu_peers(records):
    """The planner's kernels beside PyTorch's attention on GPUs, from interleaved runs."""
    ours = [r for r in records if "best_peer" in r and r["planned"] and on_gpu(r) and not r["overlap"]]
    ours = newest(ours, lambda r: (r["device"], r["problem"], r["mode"]))
    ours.sort(key=lambda r: (r["device"], r["mode"] != "stream", r["problem"]))
    rows = []
    for r in ours:
        low, high = r["ratio_ci95"]
        rows.append(
            (
                r["device"],
                r["mode"],
                f"`{r['problem']}`",
                f"`{subject(r)}`",
                f"{r['p50_us']:.2f}",
                f"{r['p50_us'] * r['ratio_to_best_peer']:.2f} {r['best_peer']}",
                f"{r['ratio_to_best_peer']:.2f} ({low:.2f} to {high:.2f})",
                r["verdict"],
                r["tier"],
                f"{r['ratio_to_default']:.2f}" if "ratio_to_default" in r else "",
                f"{r['err_max']:.1e}",
                link(r),
            )
        )
    headings = (
        "GPU",
        "mode",
        "problem",
        "kernel",
        "p50 µs",
        "best peer µs",
        "times as fast (95 %)",
        "verdict",
        "tier",
        "times as fast as the default",
        "max error",
        "result",
    )
    return markdown(headings, rows)


TABLES = {"mission-gpu": mission_gpu, "gpu-peers": gpu_peers, "cpu-pytorch": cpu_pytorch}


def rewritten(path, records):
    def table(match):
        if match[2] not in TABLES:
            sys.exit(f"{path.name}: no table named {match[2]}; there are: {', '.join(TABLES)}")
        return match[1] + TABLES[match[2]](records) + match[3]

    return MARKED.sub(table, path.read_text())


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    check = sys.argv[1:] == ["--check"]
    try:
        records = results.load()
    except ValueError as error:
        sys.exit(str(error))
    stale = 0
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before, after = path.read_text(), rewritten(path, records)
        if before == after:
            continue
        if check:
            stale += 1
            lines = before.splitlines(True), after.splitlines(True)
            sys.stdout.writelines(difflib.unified_diff(*lines, f"{path.name} as it is", "from results/"))
        else:
            path.write_text(after)
            print(f"{path.relative_to(ROOT)}: tables written")
    if stale:
        sys.exit("tables and results/ disagree: python3 tools/tables.py")


if __name__ == "__main__":
    main()
