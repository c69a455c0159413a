#!/usr/bin/env python3
"""The results of the Python package, results/python/*.json, as tools/gpu_python.py, gpu_aten.py and measure_jax.py
write them.

    results_python.py           every record is sound, and the tables of docs/manual/python.md are what the records say
    results_python.py --write   writes the tables

A table stands between `<!-- NAME FILE -->` and `<!-- end -->`."""
import json
import re
import sys

import results

FOLDER = results.RESULTS / "python"
DOCUMENT = results.RESULTS.parent / "docs" / "manual" / "python.md"
MARKED = re.compile(r"(<!-- (eager|compile|transformers|table|aten-[a-z]+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
CONTENDERS = {"eager": ("acromion out=", "acromion", "torch-default", "bare launch"),
              "compile": ("acromion", "torch-default"), "transformers": ("acromion", "sdpa"), "table": ("acromion",),
              "aten-eager": ("acromion, lse", "torch", "torch, ACROMION", "torch, dropout", "torch, dropout, ACROMION"),
              "aten-models": ("torch", "torch, ACROMION"), "aten-training": ("torch, ACROMION",),
              "jax": ("acromion", "jax xla", "jax cudnn"), "jax-gradients": ("acromion", "jax xla", "jax cudnn"),
              "jax-values": ("acromion",)}
MODES = {"eager": ("host", "back-to-back", "single"), "compile": ("default", "reduce-overhead"),
         "transformers": ("back-to-back",), "table": ("values",), "aten-eager": ("host",),
         "aten-models": ("back-to-back",), "aten-training": ("values",), "jax": ("call", "chain"),
         "jax-gradients": ("call", "chain"), "jax-values": ("values",)}
PROVENANCE = ("device", "driver", "python", "acromion", "date", "seeds")


def is_estimate(record, name, interval):
    return results.is_number(record.get(name)) and results.is_interval_around(record.get(interval), record[name])


def faults_of(record):
    """What is wrong with a record, as words; empty when nothing is."""
    what = record.get("what")
    if what not in CONTENDERS:
        return [f"what is {what!r}, must be one of {', '.join(CONTENDERS)}"]
    checks = {
        "contender": record.get("contender") in CONTENDERS[what],
        "mode": record.get("mode") in MODES[what],
        "problem": bool(record.get("problem")),
        "n": results.is_count(record.get("n")) and record["n"] > 0,
        "git_sha": bool(re.fullmatch(r"[0-9a-f]{7,40}", str(record.get("git_sha")))),
        "dirty": isinstance(record.get("dirty"), bool),
        **{name: bool(record.get(name)) for name in (*PROVENANCE, "jax" if what.startswith("jax") else "torch")},
    }
    if what in ("table", "jax-values"):
        checks["failed"] = record.get("failed") == 0
        checks["worst_share_of_limit"] = results.is_number(record.get("worst_share_of_limit"))
    elif what == "aten-training":
        checks["losses"] = len(record.get("losses", ())) == len(record.get("losses_torch", ())) == record.get("n")
        checks["max_difference"] = results.is_number(record.get("max_difference"))
    else:
        checks["p50_us"] = is_estimate(record, "p50_us", "ci95_us")
        checks["p90_us"] = results.is_positive(record.get("p90_us"))
        checks["p99_us"] = results.is_positive(record.get("p99_us"))
    for name, interval in (("speedup", "speedup_ci95"), ("above_launch_us", "above_launch_ci95_us"),
                           ("above_us", "above_ci95_us")):
        if name in record:
            checks[name] = is_estimate(record, name, interval)
    return [f"{name} is {record.get(name)!r}" for name, holds in checks.items() if not holds]


def load():
    """file name -> records; raises SystemExit with all faults."""
    files = {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    faults = [f"python/{name}: record {i}: {fault}" for name, records in files.items()
              for i, record in enumerate(records) for fault in faults_of(record)]
    if faults or not files:
        sys.exit("\n".join(faults) or f"{FOLDER}: no results")
    return files


def eager_rows(records):
    yield "problem | | host | above a launch | back to back | single |", 6
    by = {(r["problem"], r["contender"], r["mode"]): r for r in records}
    for problem in dict.fromkeys(r["problem"] for r in records):
        for contender in CONTENDERS["eager"]:
            cells = []
            for mode in ("host", "above", "back-to-back", "single"):
                record = by.get((problem, contender, "host" if mode == "above" else mode), {})
                if mode == "above":
                    cells.append(f"{record['above_launch_us']:.2f}" if "above_launch_us" in record else "")
                elif record:
                    ratio = f" ({record['speedup']:.2f}×)" if "speedup" in record else ""
                    cells.append(f"{record['p50_us']:.2f}{ratio}")
                else:
                    cells.append("")
            yield f"`{problem}` | {contender} | " + " | ".join(cells) + " |", 0


def ratio_cells(ours):
    """How many times as fast as the other, with its interval, and the largest difference of the outputs."""
    low, high = ours["speedup_ci95"]
    return f"{ours['speedup']:.2f}× [{low:.2f}, {high:.2f}] | {ours['max_difference']:.1e}"


def compared_rows(records, baseline):
    yield f"| mode | acromion | {baseline} | ratio | largest difference |", 6
    by = {(r["problem"], r["mode"], r["contender"]): r for r in records}
    for (problem, mode, contender), ours in by.items():
        if contender == "acromion":
            theirs = by[problem, mode, baseline]
            yield f"{problem} | {mode} | {ours['p50_us']:.0f} | {theirs['p50_us']:.0f} | {ratio_cells(ours)} |", 0


def table_rows(records):
    yield "type | cases | failed | largest share of the limit |", 4
    for record in records:
        yield (f"{record['problem']} | {record['n']} | {record['failed']} | {record['worst_share_of_limit']:.2f} |"), 0


def aten_eager_rows(records):
    yield "problem | | host | above |", 4
    above = {"torch, ACROMION": "acromion, lse", "torch, dropout, ACROMION": "torch, dropout"}
    for record in records:
        added = f"{record['above_us']:.2f} above {above[record['contender']]}" if "above_us" in record else ""
        ratio = f" ({record['speedup']:.2f}×)" if "speedup" in record else ""
        yield f"`{record['problem']}` | {record['contender']} | {record['p50_us']:.2f}{ratio} | {added} |", 0


def aten_models_rows(records):
    yield "| torch | torch, ACROMION | ratio | largest difference |", 5
    by = {(r["problem"], r["contender"]): r for r in records}
    for (problem, contender), ours in by.items():
        if contender == "torch, ACROMION":
            theirs = by[problem, "torch"]["p50_us"]
            yield (f"{problem} | {theirs:.0f} | {ours['p50_us']:.0f} | {ratio_cells(ours)} of {ours['largest']:.1f} |",
                   0)


def aten_training_rows(records):
    yield "| steps | first and last loss | with ACROMION | largest difference | between two runs of torch |", 6
    for r in records:
        yield (f"{r['problem']} | {r['n']} | {r['losses_torch'][0]:.3f}, {r['losses_torch'][-1]:.3f} | "
               f"{r['losses'][0]:.3f}, {r['losses'][-1]:.3f} | {r['max_difference']:.3f} | "
               f"{r['max_difference_torch_again']:.3f} |"), 0


def render(what, records):
    records = [r for r in records if r["what"] == what]
    rows = {"eager": eager_rows, "table": table_rows, "aten-eager": aten_eager_rows, "aten-models": aten_models_rows,
            "aten-training": aten_training_rows, "compile": lambda r: compared_rows(r, "torch-default"),
            "transformers": lambda r: compared_rows(r, "sdpa")}[what](records)
    lines = []
    for row, columns in rows:
        lines.append(f"| {row}")
        if columns:
            lines.append("|" + "---|" * columns)
    return "\n".join(lines) + "\n"


def main():
    files = load()
    text = DOCUMENT.read_text()
    wanted = MARKED.sub(lambda m: m[1] + render(m[2], files[m[3]]) + m[4], text)
    if "--write" in sys.argv:
        DOCUMENT.write_text(wanted)
    elif wanted != text:
        sys.exit(f"{DOCUMENT.name}: a table differs from the results: tools/results_python.py --write")
    print(f"python: {sum(map(len, files.values()))} records in {len(files)} files, all sound")


if __name__ == "__main__":
    main()
