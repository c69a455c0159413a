#!/usr/bin/env python3
"""Trains a 4-layer Llama-like model with acromion.sdpa and with PyTorch's attention, from the same weights and on the
same tokens, and writes both loss curves.

    train_curves.py [--device cuda|cpu] [--steps 200] [-o curves.json]

The model predicts a Markov chain of four followers a token: its loss falls from log(vocabulary) towards log(4). A
third run repeats the first: acromion's gradients have the same bits in every run. Exit code 1 where the curves part by
more than --limit (the mean of the last tenth of the steps), or a repeated run differs on the CPU."""
import argparse
import json
import math
import sys
import time

import torch
import torch.nn.functional as F

import acromion

SIZES = {  # dim, query heads, key heads, layers, vocabulary, length, batch
    "cuda": (1024, 16, 4, 4, 512, 1024, 8),
    "cpu": (32, 4, 2, 4, 32, 24, 4),
}
FOLLOWERS = 4


def rotary(length, dim, device):
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Layer(torch.nn.Module):
    def __init__(self, dim, heads, kv_heads, attend):
        super().__init__()
        self.heads, self.kv_heads, self.attend = heads, kv_heads, attend
        self.qkv = torch.nn.Linear(dim, dim + 2 * dim // heads * kv_heads, bias=False)
        self.out = torch.nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (torch.nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x, cos, sin):
        batch, length, dim = x.shape
        rows = self.qkv(F.rms_norm(x, (dim,))).view(batch, length, -1, dim // self.heads).transpose(1, 2)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), 1)
        o = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.out(o.transpose(1, 2).reshape(batch, length, dim))
        y = F.rms_norm(x, (dim,))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(torch.nn.Module):
    def __init__(self, size, attend):
        super().__init__()
        dim, heads, kv_heads, layers, vocabulary, _, _ = size
        self.embedding = torch.nn.Embedding(vocabulary, dim)
        self.layers = torch.nn.ModuleList(Layer(dim, heads, kv_heads, attend) for _ in range(layers))
        self.head = torch.nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens, cos, sin):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(F.rms_norm(x, x.shape[-1:]))


def chain(size, steps):
    """Tokens of all steps [steps, batch, length + 1]."""
    _, _, _, _, vocabulary, length, batch = size
    generator = torch.Generator().manual_seed(7)
    followers = torch.randint(vocabulary, (vocabulary, FOLLOWERS), generator=generator)
    tokens = torch.empty(length + 1, steps * batch, dtype=torch.long)
    tokens[0] = torch.randint(vocabulary, (steps * batch,), generator=generator)
    for at in range(length):
        tokens[at + 1] = followers[tokens[at], torch.randint(FOLLOWERS, (steps * batch,), generator=generator)]
    return tokens.t().view(steps, batch, length + 1)


def train(attend, size, steps, device):
    """The losses of all steps, and seconds a step, the first ten not counted."""
    torch.manual_seed(1)
    model = Model(size, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if device == "cuda" else 3e-3)
    cos, sin = rotary(size[5], size[0] // size[1], device)
    tokens = chain(size, steps).to(device)
    losses, start = [], 0.0
    for step in range(steps):
        if step == min(10, steps - 1):
            losses = [float(loss) for loss in losses]  # waits
            start = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[step, :, :-1], cos, sin)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[step, :, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = [float(loss) for loss in losses]
    return losses, (time.perf_counter() - start) / max(steps - 10, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=float, default=0.02, help="by how much the last losses may differ")
    parser.add_argument("-o", "--output", help="a JSON file")
    options = parser.parse_args()
    size, device = SIZES[options.device], options.device

    def ours(q, k, v):
        return acromion.sdpa(q, k, v, is_causal=True, enable_gqa=True)

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    runs = {name: train(attend, size, options.steps, device)
            for name, attend in (("acromion", ours), ("sdpa", theirs), ("again", ours))}
    losses, tail = {name: run[0] for name, run in runs.items()}, max(options.steps // 10, 1)
    ends = {name: sum(values[-tail:]) / tail for name, values in losses.items()}
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "acromion": acromion.__version__, "steps": options.steps,
        "model": dict(zip(("dim", "q_heads", "kv_heads", "layers", "vocabulary", "length", "batch"), size)),
        "loss": {"acromion": losses["acromion"], "sdpa": losses["sdpa"]}, "loss_at_the_end": ends,
        "seconds_a_step": {name: run[1] for name, run in runs.items()},
        "largest_difference": max(abs(a - b) for a, b in zip(losses["acromion"], losses["sdpa"])),
        "repeated_run_is_equal": losses["acromion"] == losses["again"],
    }
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    print(f"{result['device']}: loss {losses['acromion'][0]:.4f} to {ends['acromion']:.4f}, with SDPA "
          f"{losses['sdpa'][0]:.4f} to {ends['sdpa']:.4f}; largest difference {result['largest_difference']:.4f}; "
          f"a repeated run is {'equal' if result['repeated_run_is_equal'] else 'not equal'}; "
          f"{1e3 * runs['acromion'][1]:.1f} ms a step, with SDPA {1e3 * runs['sdpa'][1]:.1f}")
    part = abs(ends["acromion"] - ends["sdpa"]) > options.limit or not math.isfinite(ends["acromion"])
    return 1 if part or (device == "cpu" and not result["repeated_run_is_equal"]) else 0


if __name__ == "__main__":
    sys.exit(main())
