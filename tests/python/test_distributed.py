#!/usr/bin/env python3
"""acromion.distributed over gloo and the fake NCCL, on the CPU: three processes, then examples/ring.py under torchrun.
Needs the installed package and PyTorch.

    test_distributed.py LIBFAKE_NCCL [unittest arguments]"""
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
import unittest

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import acromion
import acromion.distributed as several

RANKS = 3
LIMIT = 240.0  # seconds: only a hang takes so long
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "ring.py"


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def raises(kind, text, function, *args, **keywords):
    """The exception, by its class and what it says."""
    try:
        function(*args, **keywords)
    except kind as error:
        assert text in str(error), f"{error!r} does not say {text!r}"
        return error
    raise AssertionError(f"no {kind.__name__}: {text}")


def check(group, library, dtype, q_len, kv_len, layout, placement, schedule, **arguments):
    """One call over ranks is one call of one rank, twice with the same bits."""
    dim = 1 if layout == "bshd" else 2
    shapes = [(2, h, n, d) if dim == 2 else (2, n, h, d) for h, n, d in ((4, q_len, 16), (2, kv_len, 16),
                                                                         (2, kv_len, 24))]
    q, k, v = (normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    arguments.update(enable_gqa=True, layout=layout, return_lse=True)
    want, want_lse = acromion.sdpa(q, k, v, **arguments)
    mine = [several.shard(x, dim, group=group, placement=placement) for x in (q, k, v)]
    outs = [several.sdpa(*mine, group=group, q_len=q_len, kv_len=kv_len, placement=placement, schedule=schedule,
                         **arguments) for _ in range(2)]
    several.wait(group, device="cpu", timeout=LIMIT)
    limit = 2 * torch.finfo(dtype).eps * v.abs().max().item() + 1e-5
    out, lse = outs[0]
    torch.testing.assert_close(out, several.shard(want, dim, group=group, placement=placement), atol=limit, rtol=0)
    torch.testing.assert_close(lse, several.shard(want_lse, 2, group=group, placement=placement), atol=2e-5, rtol=1e-5)
    assert torch.equal(out, outs[1][0]) and torch.equal(lse, outs[1][1])


def values(rank, library):
    several.open(device="cpu", library=library, timeout=LIMIT)
    sinks = normal(4, seed=9)
    for case in ((torch.float32, 41, 41, "bhsd", "zigzag", None, {"is_causal": True}),
                 (torch.bfloat16, 37, 50, "bshd", "contiguous", "ring", {}),
                 (torch.float32, 40, 52, "bhsd", "zigzag", "ring", {"is_causal": True, "causal_align": "bottom_right",
                                                                   "sinks": sinks, "scale": 0.3}),
                 (torch.float16, 48, 48, "bshd", "zigzag", "gather", {"is_causal": True, "softcap": 2.0}),
                 (torch.float32, 60, 60, "bhsd", "contiguous", None, {"is_causal": True, "window": 7})):
        check(None, library, *case[:6], **case[6])
    plan = several.plan(device="cpu")
    assert plan.text.startswith("gather over 3 ranks") and plan.memory > 0, plan
    assert [list(r) for r in several.rows(12)] == [[2 * rank, 2 * rank + 1], [10 - 2 * rank, 11 - 2 * rank]]


def a_smaller_group(rank, library):
    pair = dist.new_group([0, 2])
    if rank == 1:
        raises(ValueError, "no rank of group", several.rows, 8, group=pair)
        return
    several.open(pair, device="cpu", library=library, timeout=LIMIT)
    check(pair, library, torch.float32, 20, 20, "bhsd", "zigzag", "ring", is_causal=True)
    assert "transfers by NCCL: rank 0: the device is the CPU" in several.plan(pair, device="cpu").text
    several.close(pair, device="cpu")
    raises(ValueError, "transfers is 'rdma', must be one of None, 'nccl'", several.open, pair, device="cpu",
           library=library, transfers="rdma")
    several.open(pair, device="cpu", library=library, timeout=LIMIT, transfers="copy_engines")
    raises(acromion.UnsupportedError, "ACR_TRANSFERS_COPY_ENGINES, and rank 0: the device is the CPU", several.sdpa,
           *(normal(1, 1, 4, 8) for _ in range(3)), group=pair)
    several.close(pair, device="cpu")
    raises(ValueError, "is not open", several.wait, pair, device="cpu")


def sharded_keys(rank, library):
    """Every rank has keys of its own, of lengths of its own."""
    lens = [[5, 9], [12, 0], [3, 8]]
    q = normal(2, 4, 1, 16)
    k, v = (normal(2, 2, RANKS * 12, 16, seed=i) for i in (1, 2))
    mine = [x[:, :, 12 * rank:12 * rank + 12].contiguous() for x in (k, v)]
    out, lse = several.sdpa(q, *mine, schedule="sharded_keys", enable_gqa=True, return_lse=True,
                            kv_lens=torch.tensor(lens[rank], dtype=torch.int32))
    there = torch.zeros(2, 1, 1, 36, dtype=torch.bool)
    for r in range(RANKS):
        for b in range(2):
            there[b, 0, 0, 12 * r:12 * r + lens[r][b]] = True
    want, want_lse = acromion.sdpa(q, k, v, attn_mask=there, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=0)


def refusals(rank, library):
    """Each is refused on every rank, and the group goes on."""
    q, k, v = (normal(1, 2, 8, 16, seed=i) for i in range(3))

    def call(*tensors, **arguments):
        return lambda: several.sdpa(*(tensors or (q, k, v)), **arguments)
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    raises(ValueError, "k is not contiguous, must be: give k.contiguous()", call(q, turned, v))
    raises(ValueError, f"q has 8 rows on rank {rank} of 3, must have 10 there of a sequence of 30", call(q_len=30))
    raises(ValueError, "schedule is 'rings', must be one of None, 'ring'", call(schedule="rings"))
    raises(ValueError, "placement is 'zig', must be one of 'contiguous'", call(placement="zig"))
    raises(ValueError, "q_len is 24, must be None", call(schedule="sharded_keys", q_len=24))
    raises(NotImplementedError, "schedule ring does not serve a bias", call(attn_mask=normal(1, 1, 8, 8)))
    raises(NotImplementedError, "schedule ring does not serve window_left", call(is_causal=True, window=3,
                                                                               schedule="ring"))
    raises(NotImplementedError, "q requires a gradient", call(q.clone().requires_grad_(), k, v))
    raises(TypeError, "k is a numpy.ndarray", call(q, k.numpy(), v))
    raises(ValueError, "open on cpu already", several.open, device="cpu", library=library)
    raises(ValueError, "library is missing", several.open, dist.new_group([0, 1, 2]), device="cpu")
    error = raises(acromion.PeerError, "has other arguments than rank 0", call(scale=0.5 + rank))
    assert error.status == -12
    check(None, library, torch.float32, 24, 24, "bhsd", "zigzag", "ring")


def refused_on_one_rank(rank, library):
    """The others learn it at once, with the text, and the group goes on; of a group's first call, too."""
    group = dist.new_group(list(range(RANKS)))
    several.open(group, device="cpu", library=library, timeout=LIMIT)
    q, k, v = (normal(1, 2, 8, 16, seed=i) for i in range(3))
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    for number, (kind, text, tensors, arguments) in enumerate((
            (ValueError, "k is not contiguous", (q, turned, v), {}),
            (NotImplementedError, "q requires a gradient", (q.clone().requires_grad_(), k, v), {}),
            (TypeError, "k is a numpy.ndarray", (q, k.numpy(), v), {}),
            (TypeError, "q is a numpy.ndarray", (q.numpy(), k, v), {}),
            (ValueError, "schedule is 'rings'", (q, k, v), {"schedule": "rings"}),
            (ValueError, "q_len is -1", (q, k, v), {"q_len": -1}),
            (TypeError, "", (q, k, v), {"no_such": 1}))):
        if rank == number % RANKS:
            raises(kind, text, several.sdpa, *tensors, group=group, **arguments)
        else:
            error = raises(acromion.PeerError, f"rank {number % RANKS} failed: {text}", several.sdpa, q, k, v,
                           group=group)
            assert error.status == -12
    check(group, library, torch.float32, 24, 24, "bhsd", "zigzag", "ring")
    several.close(group, device="cpu")


def a_library_that_is_missing(rank, library):
    group = dist.new_group(list(range(RANKS)))
    raises(acromion.DeviceError, "no NCCL", several.open, group, device="cpu", library="/nowhere/libnccl.so.2")


def more_plans_than_are_kept(rank, library):
    q, k, v = (normal(1, 1, 4, 8, seed=i) for i in range(3))
    want = several.sdpa(q, k, v, scale=1.0)
    for i in range(40):
        several.sdpa(q, k, v, scale=2.0 + i)
    assert torch.equal(several.sdpa(q, k, v, scale=1.0), want)


def a_rank_that_stays_away(rank, library):
    """The others get a typed error within the limit, and a new group works."""
    group = dist.new_group(list(range(RANKS)))
    several.open(group, device="cpu", library=library, timeout=1.0)
    q, k, v = (normal(1, 1, 4, 8, seed=i) for i in range(3))
    if rank != 1:
        raises(acromion.PeerError, "", several.sdpa, q, k, v, group=group)
        raises(acromion.PeerError, "the group is broken", several.sdpa, q, k, v, group=group)
    dist.barrier()
    several.close(group, device="cpu")
    several.open(group, device="cpu", library=library, timeout=LIMIT)
    several.sdpa(q, k, v, group=group)
    several.close(group, device="cpu")


STEPS = (values, a_smaller_group, sharded_keys, refusals, refused_on_one_rank, a_library_that_is_missing,
         more_plans_than_are_kept, a_rank_that_stays_away)


def rank_main(rank, folder, library):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS,
                            timeout=datetime.timedelta(seconds=LIMIT))
    for step in STEPS:
        try:
            step(rank, library)
            dist.barrier()
        except BaseException:
            print(f"rank {rank}: {step.__name__}", file=sys.stderr)
            traceback.print_exc()
            os._exit(1)  # the others are ended by whoever started this one
    several.close(device="cpu")
    dist.destroy_process_group()


class Distributed(unittest.TestCase):
    def test_three_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            processes.spawn(rank_main, (folder, LIBRARY), nprocs=RANKS)

    def test_without_a_process_group(self):
        with self.assertRaisesRegex(RuntimeError, "init_process_group first"):
            several.sdpa(normal(1, 1, 4, 8), normal(1, 1, 4, 8), normal(1, 1, 4, 8))

    def test_example(self):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE),
             "--device", "cpu", "--library", LIBRARY, "--length", "203", "--heads", "2", "--causal"],
            stdout=subprocess.PIPE, text=True, timeout=LIMIT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0)
        self.assertIn("rank 0 of 2: 101 of 203 rows", done.stdout)

    def test_bench(self):
        """`acromion bench --gpus` without GPUs: what it measures is nothing, that it does is."""
        def bench(*arguments):
            return subprocess.run([sys.executable, "-m", "acromion.bench_gpus", "--gpus", "2", "--on", "cpu", "--quick",
                                   "--library", LIBRARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  text=True, timeout=LIMIT)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/records.json"
            done = bench("f32:b1:h2:s90:d16:causal", "f32:b1:h4/2:s1/60:d16", "-o", path)
            self.assertEqual(done.returncode, 0, done.stderr)
            records = json.loads(pathlib.Path(path).read_text())
        self.assertEqual([r["side"] for r in records],
                         ["one GPU", "ring zigzag", "gather zigzag", "one GPU", "sharded keys"])
        for record in records:
            self.assertTrue(record["us_low"] <= record["us"] <= record["us_high"])
            if record["gpus"] == 2:
                self.assertTrue(record["differs"] <= record["limit"] and record["traffic_bytes"] > 0)
        done = bench("f32:b1:h2:s90:d16:kvlens")
        self.assertEqual(done.returncode, 2)
        self.assertIn("'kvlens' is not measured over several GPUs", done.stderr)


LIBRARY = ""
if __name__ == "__main__":
    LIBRARY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
