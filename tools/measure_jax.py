#!/usr/bin/env python3
"""Checks and measures acromion.jax.sdpa beside jax.nn.dot_product_attention on JAX's first device, a GPU or the CPU:

    measure_jax.py [--quick] [OUTPUT.json]

Needs JAX and the installed package. First values: problems and features against the definition in float64; the limit is
that of the type; gradients against those of the definition in JAX's own operations, in float32. Then times, of what is
compared in turns, A B C C B A, in one process: JAX by XLA and, on a GPU, by cuDNN; of gradients with the forward pass
that they need. `call`: one compiled call until its result is there; `chain`: one of many in a row in one program, each
reading the one before it, without the host. --quick: few and short, to see that it runs."""
import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import acromion
import acromion.jax
from turns import SEED, in_turns, ratio, summarise

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "python"))
import definition  # noqa: E402: from tests/python/

DEVICE = jax.devices()[0]
ON_GPU = DEVICE.platform != "cpu"
# The largest error of a value, as a share of the largest: the output is rounded, and so are weights.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2, "float8_e4m3fn": 6e-2}
TYPES = ("float16", "bfloat16", "float8_e4m3fn") if ON_GPU else ("float32", "bfloat16")

# batch, q heads, kv heads, q length, kv length, head dim, causal
PROBLEMS = {
    "b2:h8:s512:d64": (2, 8, 8, 512, 512, 64, False),
    "b2:h8:s512:d64:causal": (2, 8, 8, 512, 512, 64, True),
    "b4:h16:s2048:d128:causal": (4, 16, 16, 2048, 2048, 128, True),
    "b8:h32/8:s1/8192:d128": (8, 32, 8, 1, 8192, 128, False),
} if ON_GPU else {
    "b1:h8:s512:d64": (1, 8, 8, 512, 512, 64, False),
    "b1:h8:s512:d64:causal": (1, 8, 8, 512, 512, 64, True),
    "b8:h8/2:s1/1024:d64": (8, 8, 2, 1, 1024, 64, False),
}


def tensors(batch, q_heads, kv_heads, q_len, kv_len, dim, dtype):
    chance = np.random.default_rng(SEED)
    shapes = [(batch, n, heads, dim) for n, heads in ((q_len, q_heads), (kv_len, kv_heads), (kv_len, kv_heads))]
    return [jnp.asarray(chance.standard_normal(shape, np.float32), dtype) for shape in shapes]


# ---- Values ----

def features(q_len, kv_len):
    """Arguments of sdpa for a batch of 2 with 8 query heads."""
    chance = np.random.default_rng(SEED)
    causal = {"is_causal": True, "causal_align": "bottom_right"}
    bias = jnp.asarray(chance.standard_normal((1, 8, q_len, kv_len), np.float32), jnp.bfloat16)
    return {"plain": {}, "causal": causal, "window": {**causal, "window": 40}, "scale": {"scale": 0.3},
            "softcap": {**causal, "softcap": 5.0}, "bias": {"attn_mask": bias}, "mask": {"attn_mask": bias > 0},
            "sinks": {**causal, "sinks": jnp.asarray(chance.standard_normal(8), jnp.float32)},
            "lengths": {"kv_lens": jnp.array([kv_len, 3], jnp.int32)},
            "starts": {**causal, "kv_starts": jnp.array([0, 20], jnp.int32)},
            "alibi": {**causal, "alibi_slopes": jnp.asarray(2.0 ** -np.arange(1, 9), jnp.float32)}}


def double(x):
    return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)


def error_of(found, expected):
    """The largest error, as a share of the largest finite value; NaN where a value is."""
    found, finite = np.asarray(found, np.float64), np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite]):
        return float("nan")
    return float(np.abs(found[finite] - expected[finite]).max() / np.abs(expected[finite]).max())


def values(quick):
    """A record for each type, and one for each case that is wrong or not served."""
    for name in TYPES[:1 if quick else None]:
        worst, count, wrong, refused = (0.0, ""), 0, [], []
        for q_len, kv_len, dim in ((128, 128, 64), (1, 700, 128), (100, 333, 128)):
            q, k, v = (x.swapaxes(1, 2) for x in tensors(2, 8, 2, q_len, kv_len, dim, name))
            for feature, given in features(q_len, kv_len).items():
                told = f"{feature}, {q_len} queries, {kv_len} keys, dim {dim}"
                expected, lse = definition.attention(*(double(x) for x in (q, k, v)), **{
                    key: double(x) if isinstance(x, jax.Array) else x for key, x in given.items()})
                try:
                    found = jax.jit(lambda q, k, v, given=given: acromion.jax.sdpa(
                        q, k, v, enable_gqa=True, return_lse=True, **given))(q, k, v)
                    folded = jax.vmap(lambda q, k, v, given=given: acromion.jax.sdpa(
                        q, k, v, enable_gqa=True, **given), (0, None, None))(q[None], k, v)[0]
                    shares = [error_of(found[0], expected), error_of(folded, expected), error_of(found[1], lse) * 4]
                except (acromion.UnsupportedError, jax.errors.JaxRuntimeError) as error:
                    refused.append(f"{told}: {error}")
                    continue
                count += 1
                largest = float(np.max(shares))  # NaN if one is
                worst = max(worst, (largest / TOLERANCE[name], told))
                if not largest <= TOLERANCE[name]:
                    wrong.append(f"{told}: {shares}")
        yield {"what": "jax-values", "problem": name, "mode": "values", "contender": "acromion", "n": count,
               "failed": len(wrong), "wrong": wrong, "refused": refused, "worst_share_of_limit": worst[0],
               "worst_case": worst[1]}


# ---- Gradients ----

def by_definition(q, k, v, visible, softcap=None, sinks=None):
    """Attention in JAX's own operations, [batch, heads, length, dim]."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = jnp.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(visible, s, -jnp.inf)
    if sinks is not None:
        s = jnp.concatenate((s, jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))), -1)
    return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(s, -1)[..., :k.shape[2]], v)


def gradient_cases(length):
    """Names, arguments of sdpa, and what else the definition is told."""
    rows, keys = np.arange(length)[:, None], np.arange(length)
    causal, lens = keys <= rows, jnp.array([length, length // 3], jnp.int32)
    sinks = jnp.asarray(np.random.default_rng(SEED).standard_normal(8), jnp.float32)
    asked = {"is_causal": True, "causal_align": "bottom_right"}
    return {"plain": ({}, np.ones_like(causal), {}), "causal": (asked, causal, {}),
            "window": ({**asked, "window": 40}, causal & (keys > rows - 40), {}),
            "softcap": ({**asked, "softcap": 5.0}, causal, {"softcap": 5.0}),
            "sinks": ({**asked, "sinks": sinks}, causal, {"sinks": sinks}),
            "lengths": ({"kv_lens": lens}, keys < np.asarray(lens)[:, None, None, None], {})}


def gradient_values(quick):
    """As values, of q's, k's and v's gradients; some are under vmap, too."""
    types = [name for name in TYPES if name != "float8_e4m3fn"]
    for name in types[:1 if quick else None]:
        worst, count, wrong, refused = (0.0, ""), 0, [], []
        for length, dim, kv_heads in ((128, 64, 8), (333, 128, 2)):
            given = tuple(x.swapaxes(1, 2) for x in tensors(2, 8, kv_heads, length, length, dim, name))
            d_o = jnp.asarray(np.random.default_rng(SEED + 1).standard_normal(given[0].shape, np.float32), name)
            for feature, (options, visible, also) in gradient_cases(length).items():
                told = f"gradients, {feature}, {length} rows, dim {dim}, {kv_heads} key heads"
                with jax.default_matmul_precision("highest"):
                    expected = jax.jit(lambda *x, seen=visible, also=also, d_o=d_o: jax.vjp(
                        lambda *y: by_definition(*y, seen, **also), *x)[1](d_o.astype(jnp.float32)))(
                            *(x.astype(jnp.float32) for x in given))

                def pull_back(*x, options=options):
                    return jax.vjp(lambda *y: acromion.jax.sdpa(*y, enable_gqa=True, **options), *x[:3])[1](x[3])
                try:
                    found = jax.jit(pull_back)(*given, d_o)
                    folded = jax.vmap(pull_back, (0, None, None, None))(given[0][None], *given[1:], d_o)
                except (acromion.UnsupportedError, jax.errors.JaxRuntimeError) as error:
                    refused.append(f"{told}: {error}")
                    continue
                count += 1
                shares = [error_of(x, np.asarray(y, np.float64)) for x, y in zip(found, expected)]
                shares += [error_of(x[0], np.asarray(y, np.float64)) for x, y in zip(folded, expected)]
                largest = float(np.max(shares)) / 4  # a gradient is five products where the output is two
                worst = max(worst, (largest / TOLERANCE[name], told))
                if not largest <= TOLERANCE[name]:
                    wrong.append(f"{told}: {shares}")
        yield {"what": "jax-values", "problem": f"bwd:{name}", "mode": "values", "contender": "acromion", "n": count,
               "failed": len(wrong), "wrong": wrong, "refused": refused, "worst_share_of_limit": worst[0],
               "worst_case": worst[1]}


# ---- Times ----

def one_call(attend, given):
    compiled = jax.jit(attend)
    compiled(*given).block_until_ready()

    def measure():
        start = time.perf_counter_ns()
        compiled(*given).block_until_ready()
        return (time.perf_counter_ns() - start) / 1e3
    return measure


def chained(attend, given, count):
    """The output is the next query; of gradients that of q."""
    def many(q, *others):
        for _ in range(count):
            q = attend(q, *others)
        return q
    measure = one_call(many, given)
    return lambda: measure() / count


def contenders(causal):
    def ours(q, k, v):
        align = "bottom_right" if causal else None
        return acromion.jax.sdpa(q, k, v, layout="bshd", enable_gqa=True, is_causal=causal, causal_align=align)

    def jax_by(implementation):
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)
    return {"acromion": ours, "jax xla": jax_by("xla"), **({"jax cudnn": jax_by("cudnn")} if ON_GPU else {})}


def pulling_back(attend):
    """The gradients of attend, as a function of q, k, v and the gradient of the output: their sum, of q's shape, so
    that none of them is left out."""
    def sum_of_all(q, k, v, d_o):
        dq, dk, dv = jax.vjp(attend, q, k, v)[1](d_o)
        return dq + dk + dv
    return sum_of_all


def times(quick, gradients):
    blocks, count = (3, 2) if quick else (30, 20 if ON_GPU else 5)
    problems = {text: sizes for text, sizes in PROBLEMS.items() if not gradients or sizes[1:4:2] == sizes[2:5:2]}
    for problem, (*sizes, causal) in list(problems.items())[:1 if quick else None]:
        given = tensors(*sizes, jnp.float16 if ON_GPU else jnp.float32)
        if gradients:
            problem, given = f"bwd:{problem}", given + given[:1]
        for mode, prepare in (("call", one_call), ("chain", lambda *what: chained(*what, count))):
            measures = {}
            for name, attend in contenders(causal).items():
                attend = pulling_back(attend) if gradients else attend
                try:
                    measures[name] = prepare(attend, given)
                except Exception as error:  # cuDNN may be missing, or not serve it
                    print(f"{problem}: no {name}: {str(error).splitlines()[0]}", flush=True)
            in_turns(measures, 3)
            found = in_turns(measures, blocks)
            for name, spent in found.items():
                record = {"what": "jax-gradients" if gradients else "jax", "problem": problem, "mode": mode,
                          "contender": name, **summarise(spent)}
                if name != "acromion":
                    record |= ratio(spent, found["acromion"])  # how many times as fast acromion is
                yield record


def provenance():
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True).stdout.split() if ON_GPU else []
    return {"device": DEVICE.device_kind, "driver": driver[0] if driver else "", "jax": jax.__version__,
            "python": sys.version.split()[0], "acromion": acromion.__version__,
            "git_sha": os.environ.get("ACR_GIT_SHA", ""), "dirty": os.environ.get("ACR_GIT_DIRTY", "1") != "0",
            "seeds": {"inputs": SEED, "bootstrap": SEED},
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def told(record):
    """A record in one line."""
    if record["what"] == "jax-values":
        lines = [f"{record['problem']}: {record['n']} cases, {record['failed']} wrong, the worst takes "
                 f"{record['worst_share_of_limit']:.2f} of the limit; {len(record['refused'])} refused"]
        return "\n    ".join(lines + record["wrong"] + record["refused"])
    ratio_text = f"acromion is {record['speedup']:.2f} times as fast" if "speedup" in record else ""
    named = f"{record['problem']:26} {record['mode']:6} {record['contender']:10}"
    return f"{named} {record['p50_us']:9.1f} µs  {ratio_text}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and short, to see that it runs")
    parser.add_argument("output", nargs="?", help="a file for all records, as JSON")
    options = parser.parse_args()
    print(f"on {DEVICE.device_kind}: {jax.__version__} of JAX, {acromion.__version__} of acromion")
    common, records = provenance(), []
    quick = options.quick
    for part in (values(quick), gradient_values(quick), times(quick, False), times(quick, True)):
        for record in part:
            records.append(record | common)
            print(told(record), flush=True)
            if options.output:
                pathlib.Path(options.output).write_text(json.dumps(records, indent=1) + "\n")
    if any(record.get("failed") for record in records):
        sys.exit("values are wrong (above)")


if __name__ == "__main__":
    main()
