#!/usr/bin/env python3
"""An external proposer for `acromion evolve`, as small as one can be: reads a request on stdin, writes an answer.

    acromion evolve --proposer "python3 tools/proposers/scripted.py" ...

It climbs: from the best elite (or the incumbent), it moves one parameter to its next or previous value, and takes one
of those sets that was not tried before. docs/manual/evolve.md describes both documents.
"""
import json
import sys


def parse_set(text):
    """{"Q_TILE": "64"} of "Q_TILE=64 ..."."""
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def start_of(request):
    """The set to start from: (family, arch, values)."""
    known = request["elites"] or [request["task"]["incumbent"]]
    for trial in known:
        if any(space["family"] == trial["family"] for space in request["spaces"]):
            return trial["family"], trial["arch"], parse_set(trial["parameters"])
    space = request["spaces"][0]
    middle = {p["name"]: str(p["values"][len(p["values"]) // 2]) for p in space["parameters"]}
    return space["family"], space["archs"][0], middle


def neighbours(space, values):
    """Sets that differ from `values` in one parameter, by one step."""
    for parameter in space["parameters"]:
        name, listed = parameter["name"], parameter["values"]
        now = int(values.get(name, parameter.get("default", listed[0])))
        if now not in listed:
            continue
        at = listed.index(now)
        for step in (1, -1):
            if 0 <= at + step < len(listed):
                yield name, listed[at + step], {**values, name: str(listed[at + step])}


def tried(request):
    """What was proposed before, as comparable sets."""
    return [(t["family"], t["arch"], parse_set(t["parameters"]))
            for t in request["history"] + [request["task"]["incumbent"]]]


def main():
    request = json.load(sys.stdin)
    family, arch, values = start_of(request)
    space = next(s for s in request["spaces"] if s["family"] == family)
    before = tried(request)
    steps = [n for n in neighbours(space, values) if (family, arch, n[2]) not in before]
    if not steps:
        sys.exit("no neighbour is left")
    name, value, proposed = steps[request["trial"] % len(steps)]
    json.dump({"family": family, "arch": arch, "parameters": proposed,
               "rationale": f"one step from the best known set: {name}={value}"}, sys.stdout)


if __name__ == "__main__":
    main()
