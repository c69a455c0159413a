"""Comparing in one process: measures taken in turns, their spread, and how many times faster one is."""
import math
import random
import statistics

SEED = 1


def percentile(sorted_values, share):
    return sorted_values[min(len(sorted_values) - 1, math.ceil(share * len(sorted_values)) - 1)]


def interval(values, of=statistics.median):
    """A 95 % interval by bootstrap over blocks."""
    chance = random.Random(SEED)
    found = sorted(of(chance.choices(values, k=len(values))) for _ in range(1000))
    return [found[24], found[974]]


def in_turns(measures, blocks):
    """For each name the block values of its measure: the mean of two, taken in the order A B C C B A."""
    order = [*measures, *reversed(measures)]
    found = {name: [] for name in measures}
    for _ in range(blocks):
        block = {name: [] for name in measures}
        for name in order:
            block[name].append(measures[name]())
        for name, pair in block.items():
            found[name].append(sum(pair) / 2)
    return found


def summarise(values):
    ordered = sorted(values)
    return {"p50_us": statistics.median(ordered), "p90_us": percentile(ordered, 0.9),
            "p99_us": percentile(ordered, 0.99), "n": len(ordered), "ci95_us": interval(ordered)}


def ratio(baseline, values):
    """How many times faster than the baseline: the median of the blocks' ratios, and its interval."""
    ratios = [b / v for b, v in zip(baseline, values)]
    return {"speedup": statistics.median(ratios), "speedup_ci95": interval(ratios)}
