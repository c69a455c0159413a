#!/usr/bin/env python3
"""Runs of the search as Markdown: a table of them, then each one's curve, cells and alarms.

    evolve_table.py SUMMARY.json...      as `acromion trials summary --json` prints them; the run's name is the file's

What is not confirmed is said to be so; the random control stands beside the search everywhere.
"""
import json
import pathlib
import sys

COLUMNS = ["run", "problems", "against", "trials (control)", "valid", "cells", "best in the search (control)",
           "confirmed (control)", "noise floor", "state"]
CURVE_POINTS = 9


def speedup(finding):
    """1.234 [1.230, 1.238] of a finding, or a dash."""
    return f"{finding['speedup']:.3f} [{finding['low']:.3f}, {finding['high']:.3f}]" if finding else "–"


def row(name, summary):
    run, search, control = summary["run"], summary["search"], summary["control"]
    won = f"`{search['confirmed']['kernel']}` " if search["confirmed"] else ""
    return [name, "<br>".join(f"`{p['problem']}`" for p in run["problems"]), f"`{run['incumbent']['kernel']}`",
            f"{search['distinct']} ({control['distinct']}) of {run['trials']}",
            f"{search['valid']} ({control['valid']})", str(len(search["cells"])),
            f"{speedup(search['fastest'])} ({speedup(control['fastest'])})",
            f"{won}{speedup(search['confirmed'])} ({speedup(control['confirmed'])})",
            f"{100 * summary['noise_floor']:.1f} %", "finished" if summary["finished"] else "not finished"]


def line(cells):
    return "| " + " | ".join(cells) + " |"


def curve(arm):
    """(distinct trials, best so far) at about CURVE_POINTS places, the last one among them."""
    values = arm["best_after_distinct_trials"]
    step = max(1, -(-len(values) // CURVE_POINTS))
    places = [i for i in range(len(values)) if (len(values) - 1 - i) % step == 0]
    return ", ".join(f"{i + 1}: {values[i]:.3f}" for i in places) or "nothing yet"


def section(name, summary):
    run = summary["run"]
    clock = "" if run["clock"] == "real" else "; MODEL CLOCK: nothing was timed, no figure means anything"
    texts = [f"## {name}", "", summary["conclusion"], "",
             f"On {run['device']}, seed {run['seed']}, {len(summary['slices'])} slices{clock}.", "",
             "Best so far after so many distinct trials, unconfirmed:", "",
             f"- search {curve(summary['search'])}", f"- random {curve(summary['control'])}", "",
             line(["macro cell", "distinct trials", "best", "trial"]), line(["---"] * 4)]
    for cell in summary["search"]["cells"]:
        best = f"{cell['best_speedup']:.3f}" if cell["best_speedup"] is not None else "none valid"
        texts.append(line([cell["cell"], str(cell["distinct"]), best, str(cell["best_trial"] or "–")]))
    texts += ["", "Outcomes: " + ", ".join(f"{k} {n}" for k, n in sorted(summary["outcomes"].items())) + "."]
    texts += [f"\n**Alarm:** {alarm}." for alarm in summary["alarms"]]
    return "\n".join(texts)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    runs = [(pathlib.Path(path).stem, json.loads(pathlib.Path(path).read_text())) for path in sys.argv[1:]]
    print(line(COLUMNS), line(["---"] * len(COLUMNS)), *(line(row(*run)) for run in runs), sep="\n")
    for run in runs:
        print("", section(*run), sep="\n")


if __name__ == "__main__":
    main()
