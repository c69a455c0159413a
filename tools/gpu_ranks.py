#!/usr/bin/env python3
"""Attention over several GPUs of a host against one of them: random problems over groups of 2, 3, .. N ranks, rows of
both placements, rings, gathering and sharded keys, each twice with the same bits; then three faults. Started by itself
under torchrun; needs PyTorch, NCCL and the package acromion.

    gpu_ranks.py --gpus N [--problems COUNT] [--seed S] [--transfers nccl|copy_engines] [--graphs] [-o FILE]

FILE: JSON, a record for each group and schedule: how many problems, how many failed, the largest share of a limit. The
limit of an element is two roundings of the largest value, that of a log-sum-exp 2e-5 + 1e-5 of it. Exit code 1: one
failed."""
import argparse
import json
import os
import random
import sys
import time

import torch
import torch.distributed as dist

import acromion
import acromion.distributed as several


def parse():
    options = argparse.ArgumentParser()
    options.add_argument("--gpus", type=int, required=True)
    options.add_argument("--problems", type=int, default=200, help="of each group; a fifth more over sharded keys")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--transfers", choices=("nccl", "copy_engines"), help="how keys and values travel")
    options.add_argument("--graphs", action="store_true", help="every fourth problem as a CUDA graph, too, run twice")
    options.add_argument("-o", "--output")
    return options.parse_args()


def draw(rng, ranks):
    """A problem that some schedule serves: the same on every rank, which draw from the same numbers."""
    dim, group, kv_heads = rng.choice((64, 80, 128, 128, 192, 256)), rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 3))
    q_len = rng.randint(2 * ranks, 2500)
    causal = rng.random() < 0.6
    # Causal rows see a key each: the ring refuses others.
    kv_len = q_len if rng.random() < 0.6 else rng.randint(q_len if causal else 2 * ranks, 2500)
    arguments = {"is_causal": causal, "enable_gqa": True, "return_lse": True, "layout": rng.choice(("bhsd", "bshd"))}
    schedule = rng.choice((None, "ring", "gather"))
    if causal and kv_len != q_len:
        arguments["causal_align"] = rng.choice(("top_left", "bottom_right"))
    if causal and schedule != "ring" and rng.random() < 0.3:
        arguments["window"] = rng.randint(1, q_len)
    if rng.random() < 0.2:
        arguments["softcap"] = 5.0
    if rng.random() < 0.2:
        arguments["scale"] = 0.3
    return {"batch": rng.choice((1, 1, 2)), "q_heads": group * kv_heads, "kv_heads": kv_heads, "q_len": q_len,
            "kv_len": kv_len, "dim": dim, "dtype": rng.choice((torch.float16, torch.bfloat16)), "schedule": schedule,
            "placement": rng.choice(("zigzag", "contiguous")), "sinks": rng.random() < 0.2, "arguments": arguments}


def normal(generator, dtype, *shape):
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def share_of_limit(out, want, lse, want_lse, largest):
    """How much of what is allowed the largest difference takes; infinite where one is NaN."""
    limit = 2 * torch.finfo(out.dtype).eps * largest + 1e-5
    finite = torch.isfinite(want_lse)
    shares = ((out.float() - want.float()).abs().max() / limit,
              ((lse - want_lse).abs() / (2e-5 + 1e-5 * want_lse.abs()))[finite].max() if finite.any() else
              torch.zeros((), device="cuda"))
    worst = float(torch.stack([s.float() for s in shares]).max())
    same_infinities = bool(torch.equal(lse[~finite], want_lse[~finite]))
    return worst if worst == worst and same_infinities else float("inf")


def captured(call, group):
    """The outputs of two replays of a call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    outputs = []
    for _ in range(2):
        out.zero_()
        lse.zero_()
        graph.replay()
        graph.replay()  # behind the first, which nobody waits for
        several.wait(group, timeout=60)
        outputs.append((out.clone(), lse.clone()))
    return outputs


def one_problem(p, generator, group, as_graph):
    """The share of the limit, and whether a second call, and a graph's replays, had the same bits."""
    dim = 2 if p["arguments"]["layout"] == "bhsd" else 1
    q, k, v = (normal(generator, p["dtype"], *((p["batch"], heads, length, p["dim"]) if dim == 2 else
                                               (p["batch"], length, heads, p["dim"])))
               for heads, length in ((p["q_heads"], p["q_len"]), (p["kv_heads"], p["kv_len"]),
                                     (p["kv_heads"], p["kv_len"])))
    arguments = dict(p["arguments"])
    if p["sinks"]:
        arguments["sinks"] = normal(generator, torch.float32, p["q_heads"])
    want, want_lse = acromion.sdpa(q, k, v, **arguments)
    mine = [several.shard(x, dim, group=group, placement=p["placement"]) for x in (q, k, v)]

    def call():
        return several.sdpa(*mine, group=group, q_len=p["q_len"], kv_len=p["kv_len"], placement=p["placement"],
                            schedule=p["schedule"], **arguments)
    calls = [call() for _ in range(2)]
    several.wait(group, timeout=60)
    if as_graph:
        calls += captured(call, group)
    parts = [several.shard(x, at, group=group, placement=p["placement"]) for x, at in ((want, dim), (want_lse, 2))]
    out, lse = calls[0]
    same = all(torch.equal(out, again[0]) and torch.equal(lse, again[1]) for again in calls[1:])
    return share_of_limit(out, parts[0], lse, parts[1], v.abs().max().item()), same


def one_of_sharded_keys(rng, generator, group):
    """Decoding: each rank of the group has keys of its own, of lengths of its own."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    batch, kv_heads, queries, dim = rng.choice((1, 3)), rng.choice((1, 2, 8)), rng.choice((1, 4)), rng.choice((64, 128))
    dtype, keys = rng.choice((torch.float16, torch.bfloat16)), rng.randint(1, 3000)
    lens = [[rng.randint(0, keys) for _ in range(batch)] for _ in range(ranks)]
    lens[rng.randrange(ranks)] = [keys] * batch
    q = normal(generator, dtype, batch, kv_heads * queries, 1, dim)
    k, v = (normal(generator, dtype, batch, kv_heads, ranks * keys, dim) for _ in range(2))
    mine = [x[:, :, keys * rank:keys * (rank + 1)].contiguous() for x in (k, v)]
    own = torch.tensor(lens[rank], dtype=torch.int32, device="cuda")
    calls = [several.sdpa(q, *mine, group=group, schedule="sharded_keys", enable_gqa=True, return_lse=True, kv_lens=own)
             for _ in range(2)]
    several.wait(group, timeout=60)
    worst = 0.0
    for b in range(batch):
        there = torch.cat([torch.arange(n[b], device="cuda") + r * keys for r, n in enumerate(lens)])
        want, want_lse = acromion.sdpa(q[b:b + 1], k[b:b + 1, :, there].contiguous(), v[b:b + 1, :, there].contiguous(),
                                       enable_gqa=True, return_lse=True)
        worst = max(worst, share_of_limit(calls[0][0][b:b + 1], want, calls[0][1][b:b + 1], want_lse,
                                          v[b].abs().max().item()))
    return worst, all(torch.equal(x, y) for x, y in zip(*calls))


def stay_away(group, q, seen):
    """All make a call; then rank 1 makes none, and the streams of those that do must come to their end all the same."""
    several.sdpa(q, q, q, group=group)
    several.wait(group, timeout=60)
    started = time.monotonic()
    try:
        for _ in range(3 if dist.get_rank(group) != 1 else 0):
            several.sdpa(q, q, q, group=group)
        while time.monotonic() - started < 20:  # by NCCL rank 1, which waits for nobody, may not be told
            several.wait(group, timeout=5)
            time.sleep(0.1)
    except acromion.PeerError as error:
        seen["a rank that stays away from a call"] = f"{type(error).__name__}: {error}"
        seen["seconds until it is told"] = round(time.monotonic() - started, 1)
    torch.cuda.synchronize()
    seen["seconds until streams have ended"] = round(time.monotonic() - started, 1)


def faults(group, transfers):
    """What each fault raised on this rank: other arguments, after which the group goes on, a rank that stays away from
    a call, and one that stays away from the first."""
    rank = dist.get_rank(group)
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16)
    seen = {}
    try:
        several.sdpa(q, q, q, group=group, scale=0.5 + rank)
    except acromion.PeerError as error:
        seen["other arguments"] = str(error)
    several.sdpa(q, q, q, group=group)
    several.wait(group, timeout=60)
    several.close(group)
    several.open(group, timeout=5, transfers=transfers)
    stay_away(group, q, seen)
    dist.barrier(group)
    several.close(group)
    several.open(group, timeout=5, transfers=transfers)
    started = time.monotonic()
    if rank != 1:
        try:
            several.sdpa(q, q, q, group=group)
            several.wait(group, timeout=5)
        except acromion.PeerError as error:
            seen["a rank that stays away"] = f"{type(error).__name__}: {error}"
            seen["seconds"] = round(time.monotonic() - started, 1)
    dist.barrier(group)
    several.close(group)
    return seen


def run_group(given, ranks, records):
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return
    several.open(group, transfers=given.transfers)
    rng = random.Random(given.seed * 100 + ranks)
    generator = torch.Generator("cuda").manual_seed(given.seed * 100 + ranks)
    counts = {}
    for number in range(given.problems + given.problems // 5):
        if number < given.problems:
            p = draw(rng, ranks)
            name = p["schedule"] or "as planned"
            try:
                worst, same = one_problem(p, generator, group, given.graphs and number % 4 == 0)
            except acromion.UnsupportedError as error:  # on every rank alike
                records.append({"ranks": ranks, "refused": str(error), "problem": {k: str(v) for k, v in p.items()}})
                continue
        else:
            p, name = {}, "sharded keys"
            worst, same = one_of_sharded_keys(rng, generator, group)
        told = torch.tensor([worst, float(not same)], device="cuda")
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        way = [line for line in several.plan(group).text.split("\n") if line.startswith("transfers by")]
        record = counts.setdefault(name, {"ranks": ranks, "schedule": name, "way": way, "problems": 0, "failed": 0,
                                          "worst_share_of_limit": 0.0, "other_bits": 0, "failures": []})
        record["problems"] += 1
        record["worst_share_of_limit"] = max(record["worst_share_of_limit"], float(told[0]))
        record["other_bits"] += int(told[1])
        if not float(told[0]) <= 1 or told[1]:
            record["failed"] += 1
            record["failures"].append({"problem": {key: str(value) for key, value in p.items()},
                                       "share": float(told[0]), "other_bits": int(told[1])})
    records += counts.values()
    if ranks == dist.get_world_size():
        told = [None] * ranks
        dist.all_gather_object(told, faults(group, given.transfers), group=group)
        records.append({"ranks": ranks, "faults": told})
    else:
        several.close(group)


def main():
    given = parse()
    if "RANK" not in os.environ:
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                                  str(given.gpus), *sys.argv])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    records = []
    for ranks in range(2, given.gpus + 1):
        started = time.monotonic()
        run_group(given, ranks, records)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{ranks} ranks: {time.monotonic() - started:.0f} s", flush=True)
    failed = sum(record.get("failed", 0) for record in records)
    if dist.get_rank() == 0:
        document = {"gpu": torch.cuda.get_device_name(), "seed": given.seed, "records": records}
        if given.output:
            with open(given.output, "w", encoding="ascii") as file:
                json.dump(document, file, indent=1)
                file.write("\n")
        for record in records:
            print(record)
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
