#!/usr/bin/env python3
"""Measures the Python package on a GPU beside PyTorch: gpu_python.py LAUNCH_COST_LIBRARY OUTPUT.json

Eager calls beside SDPA's and beside a bare launch, compiled blocks, and transformers' models; and counts the table of
cases. Everything compared is measured in turns, A B C C B A, in one process. tools/gpu-python.sh prepares it."""
import ctypes
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import acromion
from turns import SEED, in_turns, interval, ratio, summarise

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "python"))
from cases import table  # noqa: E402: from tests/python/
from torch_cases import check  # noqa: E402

CASES = 320


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to("cuda", torch.float16)


# ---- What is measured ----

def in_a_row(call, count, until):
    """Time a call of `count` in a row on an idle device, from the first until `until` returns."""
    def measure():
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        until()
        return (time.perf_counter_ns() - start) / count / 1e3
    return measure


def host_time(call, count):
    """Host time a call, enqueueing `count` on an idle device: the device's time does not enter."""
    return in_a_row(call, count, lambda: None)


def back_to_back(call, count):
    """Time a call of `count` in a row, until the device is done."""
    return in_a_row(call, count, torch.cuda.synchronize)


def single(call, count):
    """Time of a call alone, from the call until the device is done."""
    def measure():
        elapsed = 0
        for _ in range(count):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            call()
            torch.cuda.synchronize()
            elapsed += time.perf_counter_ns() - start
        return elapsed / count / 1e3
    return measure


def eager(cost):
    problems = {
        "b2:h8:s512:d64": (2, 8, 8, 512, 512, 64, False),
        "b2:h8:s512:d64:causal": (2, 8, 8, 512, 512, 64, True),
        "b1:h8:s128:d64": (1, 8, 8, 128, 128, 64, False),
        "b8:h32/8:s1/2048:d128": (8, 32, 8, 1, 2048, 128, False),
    }
    for problem, (batch, q_heads, kv_heads, q_len, kv_len, dim, causal) in problems.items():
        q, k, v = normal(batch, q_heads, q_len, dim), normal(batch, kv_heads, kv_len, dim), \
            normal(batch, kv_heads, kv_len, dim)
        out, gqa = torch.empty_like(q), q_heads != kv_heads
        sdpa, theirs = acromion.sdpa, F.scaled_dot_product_attention
        calls = {
            "acromion out=": lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=gqa, out=out),
            "acromion": lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=gqa),
            "torch-default": lambda: theirs(q, k, v, is_causal=causal, enable_gqa=gqa),
        }
        exact = theirs(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=gqa)
        error = {name: (call().double() - exact).abs().max().item() for name, call in calls.items()}
        kernel = acromion.explain(q, k, v, is_causal=causal, enable_gqa=gqa)
        for mode, measure, count, blocks in (("host", host_time, 100, 80), ("back-to-back", back_to_back, 400, 40),
                                              ("single", single, 50, 40)):
            measures = {name: measure(call, count) for name, call in calls.items()}
            if mode == "host":
                stream = torch.cuda.current_stream().cuda_stream
                measures["bare launch"] = lambda: (torch.cuda.synchronize(), cost.launch_cost_us(stream, count))[1]
            in_turns(measures, 5)  # warms clocks and caches
            found = in_turns(measures, blocks)
            for name, values in found.items():
                record = {"what": "eager", "problem": problem, "mode": mode, "contender": name, **summarise(values)}
                if name.startswith("acromion"):
                    record |= {"kernel": kernel, **ratio(found["torch-default"], values)}
                    if mode == "host":
                        added = [value - bare for value, bare in zip(values, found["bare launch"])]
                        record |= {"above_launch_us": statistics.median(added), "above_launch_ci95_us": interval(added)}
                if name in error:
                    record["err_max"] = error[name]
                yield record


def compiled():
    """Projection, attention, projection: by inductor, fullgraph, around either attention."""
    x, into, onto = normal(2, 512, 512) / 8, normal(512, 1536) / 16, normal(512, 512) / 16

    def block(attention):
        def run(x):
            q, k, v = ((x @ into).view(2, 512, 3, 8, 64).permute(2, 0, 3, 1, 4)).unbind(0)
            return F.gelu(attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 512, 512) @ onto)
        return run
    for mode in ("default", "reduce-overhead"):
        calls = {}
        for name, attention in (("acromion", acromion.sdpa), ("torch-default", F.scaled_dot_product_attention)):
            torch._dynamo.reset()
            function = torch.compile(block(attention), fullgraph=True, mode=mode)
            for _ in range(4):
                function(x)
            calls[name] = lambda function=function: function(x)
        difference = (calls["acromion"]() - block(F.scaled_dot_product_attention)(x)).abs().max().item()
        found = in_turns({name: back_to_back(call, 100) for name, call in calls.items()}, 30)
        for name, values in found.items():
            record = {"what": "compile", "problem": "b2:h8:s512:d64:causal, with projections", "mode": mode,
                      "contender": name, **summarise(values)}
            if name == "acromion":
                record |= ratio(found["torch-default"], values) | {"max_difference": difference}
            yield record


def models():
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
    acromion.register_transformers()
    torch.manual_seed(SEED)
    shared = {"vocab_size": 1000, "num_hidden_layers": 8, "num_attention_heads": 16, "hidden_size": 1024,
              "intermediate_size": 2816, "max_position_embeddings": 4096}
    made = {"llama": LlamaForCausalLM(LlamaConfig(num_key_value_heads=4, **shared)),
            "bert": BertModel(BertConfig(**shared))}
    for kind, model in made.items():
        model = model.to("cuda", torch.float16).eval()
        for batch, length, padded in ((2, 512, False), (8, 512, True), (2, 2048, False)):
            tokens = torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(SEED)).cuda()
            padding = torch.ones_like(tokens)
            if padded:
                for i in range(batch):
                    padding[i, length - i * length // (2 * batch):] = 0

            def forward():
                return model(tokens, attention_mask=padding, **({"use_cache": False} if kind == "llama" else {}))[0]

            def under(name, measure):
                def run():
                    model.set_attn_implementation(name)
                    return measure()
                return run
            results = {name: under(name, forward)()[padding.bool()] for name in ("acromion", "sdpa")}
            found = in_turns({name: under(name, back_to_back(forward, 5)) for name in results}, 8)
            for name, values in found.items():
                record = {"what": "transformers", "mode": "back-to-back", "contender": name, **summarise(values),
                          "problem": f"{kind}, 8 layers of 1024, 16 heads of 64, batch {batch}, {length} tokens"
                                     + (", padded on the right" if padded else "")}
                if name == "acromion":
                    record |= ratio(found["sdpa"], values) | {
                        "max_difference": (results["acromion"] - results["sdpa"]).abs().max().item(),
                        "largest_logit": results["sdpa"].abs().max().item()}
                yield record


def case_table():
    outcomes = {}
    for case in table(CASES, ("float16", "bfloat16", "float32")):
        error, limit = check(case, "cuda")
        outcomes.setdefault(case.dtype, []).append((error / limit if limit else 0, not error <= limit, str(case)))
    for dtype, found in outcomes.items():
        worst = max(found)
        yield {"what": "table", "problem": dtype, "mode": "values", "contender": "acromion", "n": len(found),
               "failed": sum(bad for _, bad, _ in found), "worst_share_of_limit": worst[0], "worst_case": worst[2]}


def provenance():
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True).stdout.strip()
    return {"device": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__,
            "python": sys.version.split()[0], "acromion": acromion.__version__,
            "git_sha": os.environ.get("ACR_GIT_SHA", ""), "dirty": os.environ.get("ACR_GIT_DIRTY", "1") != "0",
            "seeds": {"inputs": SEED, "bootstrap": SEED},
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def main():
    library, output = sys.argv[1:]
    cost = ctypes.CDLL(os.path.abspath(library))
    cost.launch_cost_us.restype = ctypes.c_double
    cost.launch_cost_us.argtypes = [ctypes.c_void_p, ctypes.c_int]
    torch.zeros(1, device="cuda")
    failed = cost.launch_cost_setup()
    if failed:
        sys.exit(f"no bare launch: the driver says {failed}")
    common = provenance()
    records, broken = [], []
    with torch.no_grad():
        for part in (eager, case_table, models, compiled):
            try:
                for record in part(cost) if part is eager else part():
                    records.append(record | common)
                    print(json.dumps(record), flush=True)
            except Exception as error:  # the other parts still tell something
                broken.append(f"{part.__name__}: {type(error).__name__}: {error}")
            pathlib.Path(output).write_text(json.dumps(records, indent=1) + "\n")
    if broken or any(record.get("failed") for record in records):
        sys.exit("\n".join(broken) or "cases of the table failed")


if __name__ == "__main__":
    main()
