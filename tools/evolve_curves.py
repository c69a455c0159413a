#!/usr/bin/env python3
"""Does the search beat random search, and by how much? Curves of several seeds of one search, with intervals.

    evolve_curves.py SUMMARIES.json... [-o CURVES.json] [--into DOCUMENT.md]

SUMMARIES: what tools/gpu-campaign.sh leaves (a list of {"name", "summary"}) or what `acromion trials summary --json`
prints. Runs that differ in nothing but their seeds are one set; sets of one run are left out. -o writes the curves,
which `acromion report` draws. The table goes to standard output, or between `<!-- curves -->` and `<!-- /curves -->` of
a document.

A value of a curve is the best speed-up over the incumbent that an arm has seen after so many distinct trials, at least
1; unconfirmed. What is compared is search / random of each seed, whose arms ran in turn under the same conditions. The
middle of seeds is their median, its interval that of order statistics (docs/internals/statistics.md, "Processes"): with
six to eight seeds from the least to the largest; with fewer there is none of 95 %.
"""
import argparse
import json
import math
import pathlib
import statistics
import sys
import textwrap

NEAR = 0.99  # of the best that any run of the set has seen: as good as found
MARKS = (0.25, 0.5, 0.75, 1.0)
OPEN, CLOSE = "<!-- curves -->", "<!-- /curves -->"
OF_A_RUN = {"seed", "visible_seed", "hidden_seed", "threads"}  # what may differ within a set


def read(paths):
    """(file, name, summary) of every run."""
    for path in paths:
        content = json.loads(pathlib.Path(path).read_text())
        runs = content if isinstance(content, list) else [{"name": pathlib.Path(path).stem, "summary": content}]
        for run in runs:
            yield pathlib.Path(path).name, run["name"], run["summary"]


def sets_of(runs):
    found = {}
    for file, name, summary in runs:
        key = json.dumps({k: v for k, v in summary["run"].items() if k not in OF_A_RUN}, sort_keys=True)
        found.setdefault(key, []).append((file, name, summary))
    return [sorted(runs, key=lambda run: int(run[2]["run"]["seed"])) for runs in found.values() if len(runs) > 1]


def interval(values):
    """Of the median, by order statistics: each side misses by 2.5 % at most. None where there are too few."""
    count, rank, below = len(values), 0, 0.0
    while below + math.comb(count, rank) * 0.5 ** count <= 0.025:
        below += math.comb(count, rank) * 0.5 ** count
        rank += 1
    return [sorted(values)[rank - 1], sorted(values)[count - rank]] if rank else None


def middle(values):
    return {"median": statistics.median(values), "interval": interval(values), "least": min(values),
            "most": max(values)}


def until_near(curve, best):
    """Trials until it is near the best; None where it never was."""
    return next((i + 1 for i, value in enumerate(curve) if value >= NEAR * best), None)


def analyse(runs):
    curves = {arm: [summary[arm]["best_after_distinct_trials"] for _, _, summary in runs]
              for arm in ("search", "control")}
    trials = min(len(curve) for arm in curves.values() for curve in arm)
    if trials == 0:
        return None
    best = max(value for arm in curves.values() for curve in arm for value in curve)
    curves = {arm: [curve[:trials] for curve in list_] for arm, list_ in curves.items()}
    ratios = [[s / c for s, c in zip(*pair)] for pair in zip(curves["search"], curves["control"])]
    run = runs[0][2]["run"]
    near = {arm: [until_near(curve, best) for curve in list_] for arm, list_ in curves.items()}
    return {
        "files": sorted({file for file, _, _ in runs}), "names": [name for _, name, _ in runs],
        "problems": [p["problem"] for p in run["problems"]], "device": run["device"], "clock": run["clock"],
        "families": run["families"], "incumbent": run["incumbent"]["kernel"],
        "chosen_by_user": run["incumbent"]["chosen_by_user"], "generation": run["generation"],
        "seeds": [int(summary["run"]["seed"]) for _, _, summary in runs], "trials": trials,
        "distinct": sum(summary[arm]["distinct"] for _, _, summary in runs for arm in curves),
        "noise_floor": max(summary["noise_floor"] for _, _, summary in runs), "best": best,
        "search": curves["search"], "random": curves["control"],
        "by_trial": [{"search": middle([c[t] for c in curves["search"]]),
                      "random": middle([c[t] for c in curves["control"]]), "ratio": middle([r[t] for r in ratios])}
                     for t in range(trials)],
        "mean_ratio": middle([math.exp(sum(map(math.log, r)) / trials) for r in ratios]),
        "until_near": {"search": near["search"], "random": near["control"]},
    }


def text_of(m):
    bounds = m["interval"]
    return f"{m['median']:.3f} " + (f"[{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "(too few seeds)")


def reached(values, trials):
    """6 (5 of 6): the median number of trials, and how many got there."""
    number = statistics.median(value or math.inf for value in values)
    found = sum(value is not None for value in values)
    return f"{f'{number:g}' if math.isfinite(number) else f'> {trials}'} ({found} of {len(values)})"


def verdict(m):
    if not m["interval"]:
        return "too few seeds"
    low, high = m["interval"]
    return "the search is better" if low > 1 else "random is better" if high < 1 else "not told apart"


def line(cells):
    return "| " + " | ".join(cells) + " |"


def folded(text, indent=""):
    """The lines of a page's paragraph."""
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(sets):
    rows = []
    for s in sets:
        marks = sorted({max(1, round(mark * s["trials"])) for mark in MARKS})
        clock = "; MODEL CLOCK: nothing was timed" if s["clock"] != "real" else ""
        rows += ["", *folded(f"`{'`, `'.join(s['problems'])}` against `{s['incumbent']}`"
                 f"{', families ' + s['families'] if s['families'] else ''}, {s['device']}, "
                 f"{len(s['seeds'])} seeds, {s['trials']} distinct trials of each arm, noise floor "
                 f"{100 * s['noise_floor']:.1f} %{clock}:"),
                 "", line(["after trials", "search", "random", "search / random"]), line(["---"] * 4)]
        for t in marks:
            at = s["by_trial"][t - 1]
            rows.append(line([str(t), text_of(at["search"]), text_of(at["random"]), text_of(at["ratio"])]))
        rows += ["", f"- Mean over all trials of search / random: {text_of(s['mean_ratio'])}: "
                 f"**{verdict(s['mean_ratio'])}**.",
                 *folded(f"- Trials until within 1 % of the best that any run saw ({s['best']:.3f}): search "
                 f"{reached(s['until_near']['search'], s['trials'])}, random "
                 f"{reached(s['until_near']['random'], s['trials'])}.", indent="  ")]
    return "\n".join(rows).strip() + "\n" if rows else "No search with more than one seed.\n"


def put_into(path, text):
    document = pathlib.Path(path).read_text()
    if document.count(OPEN) != 1 or CLOSE not in document.split(OPEN)[1]:
        sys.exit(f"{path}: no {OPEN} with {CLOSE} behind it")
    before, rest = document.split(OPEN)
    pathlib.Path(path).write_text(f"{before}{OPEN}\n{text}{CLOSE}{rest.split(CLOSE, 1)[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("-o", "--output")
    parser.add_argument("--into")
    options = parser.parse_args()
    sets = list(filter(None, map(analyse, sets_of(read(options.files)))))
    if options.output and sets:
        pathlib.Path(options.output).write_text(json.dumps({"search_curves": sets}) + "\n")
    if options.into:
        put_into(options.into, table(sets))
    else:
        print(table(sets), end="")


if __name__ == "__main__":
    main()
