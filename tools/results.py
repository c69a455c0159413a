"""The result files: reading them and what must hold in each. Standard library only.

results/*.json hold what `acromion bench -o FILE` writes: an array of records; docs/manual/measuring.md explains the
fields."""
import json
import math
import pathlib
import re

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
MODES = ("stream", "sustained", "full-clock", "rotating", "cold", "call", "call-single", "host")
HOST_STEPS = ("bare launch", "acr_execute", "acr_forward", "plan look-up", "first call, cold process")
STATE_FIELDS = ("sm_mhz", "memory_mhz", "temperature_c", "power_w", "reasons")
COUNTS = r"[1-9]\d*(/[1-9]\d*)?"
PROBLEM = re.compile(rf"^(bwd:)?((f32|bf16|e4m3):)?b[1-9]\d*:h{COUNTS}:s{COUNTS}:d{COUNTS}(:[a-z0-9=,-]+)*$")


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


def is_state(value):
    """A GPU's state: null, or some of the fields; all are optional."""
    return value is None or isinstance(value, dict) and set(value) <= set(STATE_FIELDS)


def is_clocks(value):
    if value is None:
        return True
    if isinstance(value, dict) and set(value) == {"cpu_mhz_before", "cpu_mhz_after"}:
        return all(is_positive(mhz) for mhz in value.values())
    return (isinstance(value, dict) and is_positive(value.get("nominal_mhz"))
            and all(is_state(value.get(name)) for name in ("before", "after", "range")))


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
    "clocks": (
        lambda r: is_clocks(r["clocks"]),
        "nominal_mhz and the states before, after, range; a processor's clock; or null",
    ),
    "git_sha": (lambda r: re.fullmatch(r"[0-9a-f]{7,40}", str(r["git_sha"])), "a commit"),
    "dirty": (lambda r: isinstance(r["dirty"], bool), "true or false"),
    "seeds": (lambda r: isinstance(r["seeds"], dict), "an object: what was seeded with which number"),
    "date": (lambda r: re.match(r"^\d{4}-\d{2}-\d{2}", str(r["date"])), "an ISO 8601 date"),
}

VERDICTS = ("FASTER", "SLOWER", "SAME", "AMBIGUOUS")
TIERS = ("A+", "A", "B+", "B", "C", "-")


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# The same for fields that not all records have: where one field of a group is there, all of it must be.
DISCARDED = {"discarded": (lambda r: is_count(r["discarded"]), "a count of discarded blocks")}
COMPARISON = {"blocks": (lambda r: is_count(r["blocks"]) and r["blocks"] > 0, "a positive count of blocks")}
SETS = {"buffer_sets": (lambda r: is_count(r["buffer_sets"]) and r["buffer_sets"] > 0, "a positive count")}
LADDER = {
    "rung": (lambda r: is_count(r["rung"]), "a rung's number"),
    "gain": (lambda r: r["gain"] is None or is_positive(r["gain"]), "a positive number or null"),
    "gain_predicted": (
        lambda r: r["gain_predicted"] is None or is_positive(r["gain_predicted"]), "a positive number or null"),
}
ABOVE_BARE = {
    "above_bare_us": (lambda r: is_number(r["above_bare_us"]), "a number"),
    "above_bare_ci95": (
        lambda r: len(r["above_bare_ci95"]) == 2
        and r["above_bare_ci95"][0] <= r["above_bare_us"] <= r["above_bare_ci95"][1], "[low, high] around it"),
}
OURS_AMONG_PEERS = {
    "planned": (lambda r: isinstance(r["planned"], bool), "true or false"),
    "noise_floor": (lambda r: is_number(r["noise_floor"]) and r["noise_floor"] >= 0.01, "at least 0.01"),
    "control": (lambda r: r["control"] in VERDICTS, "one of " + ", ".join(VERDICTS)),
}


def against(peer, ratio, interval, tier):
    """The fields of a comparison with one peer, by their names."""
    return {
        peer: (lambda r: isinstance(r[peer], str) and r[peer], "a peer's name"),
        ratio: (lambda r: is_positive(r[ratio]), "a positive number"),
        interval: (lambda r: is_interval_around(r[interval], r[ratio]), "[low, high] around " + ratio),
        tier: (lambda r: r[tier] in TIERS, "one of " + ", ".join(TIERS)),
    }


AGAINST_BEST = {
    **against("best_peer", "ratio_to_best_peer", "ratio_ci95", "tier"),
    "verdict": (lambda r: r["verdict"] in VERDICTS, "one of " + ", ".join(VERDICTS)),
}
AGAINST_DEFAULT = against("default_peer", "ratio_to_default", "ratio_to_default_ci95", "tier_to_default")
PEER = {
    "peer_version": (lambda r: isinstance(r["peer_version"], str) and r["peer_version"], "the peer's version"),
    "within_tolerance": (lambda r: isinstance(r["within_tolerance"], bool), "true or false"),
}
PEER_NOTE = {"peer_note": (lambda r: isinstance(r["peer_note"], str) and r["peer_note"], "words")}
STEP = {"with_forward": (lambda r: r["with_forward"] is True, "true, or not there")}
OPTIONAL = (DISCARDED, COMPARISON, SETS, LADDER, ABOVE_BARE, OURS_AMONG_PEERS, AGAINST_BEST, AGAINST_DEFAULT, PEER,
            PEER_NOTE, STEP)
# What a mode's records must have beyond those of others.
OF_MODE = {
    "rotating": {"buffer_sets": (lambda r: is_count(r["buffer_sets"]) and r["buffer_sets"] > 1, "at least 2")},
    "sustained": {"joules": (lambda r: r["joules"] is None or is_positive(r["joules"]), "a positive number or null")},
    "cold": {"empty_us": (lambda r: is_positive(r["empty_us"]), "what no launch at all takes")},
    "host": {"step": (lambda r: r["step"] in HOST_STEPS, "one of " + ", ".join(HOST_STEPS))},
}


def fields_of(record):
    """What must hold for this record: what must for all, and each optional group of which it has a field."""
    fields = dict(FIELDS)
    for group in OPTIONAL:
        if any(name in record for name in group):
            fields |= group
    if "blocks" in record or "verdict" in record:
        fields |= COMPARISON | DISCARDED
    return fields | OF_MODE.get(record.get("mode"), {})


def faults_of(record):
    """What is wrong with a record, as sentences; empty when nothing is."""
    if not isinstance(record, dict):
        return ["is no object"]
    fields = fields_of(record)
    missing = [name for name in fields if name not in record]
    if missing:
        return ["lacks " + ", ".join(missing)]
    faults = [
        f"{name} is {record[name]!r}, must be {words}" for name, (holds, words) in fields.items() if not holds(record)
    ]
    if ("kernel" in record) == ("peer" in record):
        faults.append("names not exactly one of kernel and peer")
    return faults


def faults_of_file(path, records):
    """One file for one machine and day, which its name says."""
    faults = []
    for field in ("device", "host"):
        values = sorted({r[field] for r in records if field in r})
        if len(values) > 1:
            faults.append(f"{path.name}: records of several machines: {field} is {', '.join(values)}")
    days = sorted({str(r["date"])[:10] for r in records if "date" in r})
    if any(day not in path.name for day in days):
        faults.append(f"{path.name}: records of {', '.join(days)}: the name must hold the one day")
    return faults


# ---- Profiles: results/profile/*.json, what `acromion profile -o FILE` writes ----

COUNTERS = (
    "duration_us sm_clock_mhz sm_active_pct sm_throughput_pct memory_throughput_pct tensor_pct exponentials_pct "
    "fma_pct alu_pct issue_pct shared_pct l2_pct dram_pct l2_bytes dram_read_bytes dram_write_bytes shared_wavefronts "
    "bank_conflicts occupancy_pct registers ctas threads smem_bytes waves"
).split()
STALLS = (
    "barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard math_pipe_throttle membar "
    "mio_throttle misc no_instruction not_selected short_scoreboard sleeping tex_throttle wait"
).split()


def are_amounts(values, names):
    """Exactly these names, each with a number that is not negative, or null where the tool had none."""
    return set(values) == set(names) and all(v is None or is_number(v) and v >= 0 for v in values.values())


ANY_PROFILE = {name: FIELDS[name] for name in ("problem", "device", "driver", "git_sha", "dirty", "seeds", "date")} | {
    "kernel": (lambda r: isinstance(r["kernel"], str) and r["kernel"], "a kernel's name"),
    "image": (lambda r: re.fullmatch(r"[0-9a-f]{16}", str(r["image"])), "a digest"),
}
PROFILES = {
    "counters": {
        "tool": (lambda r: isinstance(r["tool"], str) and r["tool"], "the tool's name and version"),
        "clock_control": (lambda r: r["clock_control"] == "none", "none"),
        "counters": (
            lambda r: are_amounts(r["counters"], COUNTERS) and is_positive(r["counters"]["duration_us"]),
            "an object of the counters, with a time",
        ),
        "stalls": (lambda r: are_amounts(r["stalls"], STALLS), "an object of the stalls"),
        "floor_us": (lambda r: is_positive(r["floor_us"]), "a positive number"),
        "floor_share": (
            lambda r: abs(r["floor_share"] * r["counters"]["duration_us"] / r["floor_us"] - 1) < 1e-5,
            "the floor over the time",
        ),
        "bound": (lambda r: isinstance(r["bound"], str) and r["bound"], "a resource's name"),
        "diagnosis": (lambda r: isinstance(r["diagnosis"], str) and r["diagnosis"], "sentences"),
    },
    "timeline": {
        "ctas": (lambda r: is_count(r["ctas"]) and 0 < r["ctas"] <= r["grid_ctas"], "a count, at most grid_ctas"),
        "cta_cycles": (lambda r: 0 < r["cta_cycles"] <= r["cta_cycles_max"], "at most cta_cycles_max"),
        "plain_us": (lambda r: is_positive(r["plain_us"]), "a positive number"),
        "marked_us": (lambda r: is_positive(r["marked_us"]), "a positive number"),
        "groups": (
            lambda r: r["groups"]
            and all(
                step["hits"] > 0 and 0 <= step["cycles"] <= step["cycles_max"] and 0 <= step["share"] <= 1
                for group in r["groups"]
                for step in group["steps"]
            ),
            "steps with hits, cycles of at most cycles_max, and a share",
        ),
    },
}


def profile_faults_of(record):
    """What is wrong with a profile's record, as sentences."""
    if not isinstance(record, dict) or record.get("kind") not in PROFILES:
        return ["has no kind, counters or timeline"]
    fields = ANY_PROFILE | PROFILES[record["kind"]]
    missing = [name for name in fields if name not in record]
    if missing:
        return ["lacks " + ", ".join(missing)]
    return [f"{name} is {record[name]!r}, must be {words}" for name, (holds, words) in fields.items()
            if not holds(record)]


def load(folder=RESULTS, faults_of=faults_of):
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
        faults += faults_of_file(path, [r for r in found if isinstance(r, dict)])
    if faults:
        raise ValueError("\n".join(faults))
    return records
