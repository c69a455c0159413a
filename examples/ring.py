"""Attention over several GPUs by acromion.distributed: each rank holds a part of the sequence, and what it computes is
compared with one GPU's.

    torchrun --nproc-per-node 4 examples/ring.py
    torchrun --nproc-per-node 4 examples/ring.py --length 131072 --causal --time

Without GPUs, with a library in NCCL's place that exchanges memory of the host (a build has tests/libfake_nccl.so):

    torchrun --nproc-per-node 2 examples/ring.py --device cpu --library build/tests/libfake_nccl.so --length 200"""
import argparse
import os

import torch
import torch.distributed as dist

import acromion
import acromion.distributed


def milliseconds(function, runs=20):
    """Of one call, after three that warm up."""
    for _ in range(3):
        function()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(runs):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / runs


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--library", help="in place of NCCL's")
    options.add_argument("--length", type=int, default=8192)
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--causal", action="store_true")
    options.add_argument("--time", action="store_true", help="time it on a GPU")
    given = options.parse_args()

    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    acromion.distributed.open(device=device, library=given.library)

    # A program would make only its own rows; here every rank makes all of them, to compare.
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, given.heads, given.length, 128, generator=generator).to(device, dtype) for _ in range(3))
    mine = [acromion.distributed.shard(x) for x in (q, k, v)]

    def compute():
        return acromion.distributed.sdpa(*mine, q_len=given.length, kv_len=given.length, is_causal=given.causal)

    out = compute()
    acromion.distributed.wait(device=device)
    whole = acromion.distributed.shard(acromion.sdpa(q, k, v, is_causal=given.causal))
    # Each rank's part of an output is rounded once, and the output again: two units of the largest value.
    limit = 2 * torch.finfo(dtype).eps * v.abs().max().item()
    furthest = (out - whole).abs().max().item()
    plan = acromion.distributed.plan(device=device)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {out.shape[2]} of {given.length} rows, at most "
          f"{furthest:.1e} from one rank's; {plan.traffic} bytes sent: {plan.text.splitlines()[0]}", flush=True)
    if furthest > limit:
        raise SystemExit(f"rank {dist.get_rank()}: {furthest} is more than {limit}")
    if given.time and given.device == "cuda":
        once = milliseconds(compute)
        pairs = given.length ** 2 / (2 if given.causal else 1)
        rate = 4 * given.heads * 128 * pairs / dist.get_world_size() / once / 1e9
        print(f"rank {dist.get_rank()}: {once:.3f} ms, {rate:.0f} TFLOP/s", flush=True)
    acromion.distributed.close(device=device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
