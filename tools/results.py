"""The result files: reading them and what must hold in each. Standard library only.

results/*.json hold what `acromion bench -o FILE` writes: an array of records; docs/measuring.md explains the fields."""
import json
import math
import pathlib
import re

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
MODES = ("stream", "rotating", "cold", "call")
COUNTS = r"[1-9]\d*(/[1-9]\d*)?"
PROBLEM = re.compile(rf"^((f32|bf16|e4m3):)?b[1-9]\d*:h{COUNTS}:s{COUNTS}:d{COUNTS}(:[a-z0-9=,-]+)*$")


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_positive(value):
    return is_number(value) and value > 0


def is_interval_around(value, inside):
    """[low, high] around a number; null is a side that the sample is too small to bound."""
    if not (isinstance(value, list) and len(value) == 2 and all(v is None or is_positive(v) for v in value)):
        return False
    low, high = value
    return (low is None or low <= inside) and (high is None or inside <= high)


# field -> (what must hold for a record that has every field, said in words)
FIELDS = {
    "problem": (lambda r: isinstance(r["problem"], str) and PROBLEM.match(r["problem"]), "a problem's text"),
    "mode": (lambda r: r["mode"] in MODES, "one of " + ", ".join(MODES)),
    "overlap": (lambda r: isinstance(r["overlap"], bool), "true or false"),
    "p50_us": (lambda r: is_positive(r["p50_us"]), "a positive number"),
    "p90_us": (lambda r: is_positive(r["p90_us"]) and r["p90_us"] >= r["p50_us"], "at least p50_us"),
    "p99_us": (lambda r: is_positive(r["p99_us"]) and r["p99_us"] >= r["p90_us"], "at least p90_us"),
    "n": (lambda r: isinstance(r["n"], int) and r["n"] > 0, "a positive count of samples"),
    "ci95_us": (lambda r: is_interval_around(r["ci95_us"], r["p50_us"]), "[low, high] around p50_us"),
    "err_max": (lambda r: r["err_max"] is None or is_number(r["err_max"]) and r["err_max"] >= 0, "a number or null"),
    "device": (lambda r: isinstance(r["device"], str) and r["device"], "the device's name"),
    "driver": (lambda r: isinstance(r["driver"], str) and r["driver"], "the driver's version, or none on a CPU"),
    "clocks": (lambda r: r["clocks"] is None or isinstance(r["clocks"], dict), "an object, or null where unknown"),
    "git_sha": (lambda r: re.fullmatch(r"[0-9a-f]{7,40}", str(r["git_sha"])), "a commit"),
    "dirty": (lambda r: isinstance(r["dirty"], bool), "true or false"),
    "seeds": (lambda r: isinstance(r["seeds"], dict), "an object: what was seeded with which number"),
    "date": (lambda r: re.match(r"^\d{4}-\d{2}-\d{2}", str(r["date"])), "an ISO 8601 date"),
}


def faults_of(record):
    """What is wrong with a record, as sentences; empty when nothing is."""
    if not isinstance(record, dict):
        return ["is no object"]
    missing = [name for name in FIELDS if name not in record]
    if missing:
        return ["lacks " + ", ".join(missing)]
    faults = [
        f"{name} is {record[name]!r}, must be {words}" for name, (holds, words) in FIELDS.items() if not holds(record)
    ]
    if ("kernel" in record) == ("peer" in record):
        faults.append("names not exactly one of kernel and peer")
    return faults


def load(folder=RESULTS):
    """Every record of every file, each with its file's name under "file"; raises ValueError with all faults found."""
    records, faults = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            faults.append(f"{path.name}: no JSON: {error}")
            continue
        if not isinstance(found, list):
            faults.append(f"{path.name}: no array of records")
            continue
        for i, record in enumerate(found):
            faults += [f"{path.name}: record {i}: {fault}" for fault in faults_of(record)]
            if isinstance(record, dict):
                records.append(record | {"file": path.name})
    if faults:
        raise ValueError("\n".join(faults))
    return records
