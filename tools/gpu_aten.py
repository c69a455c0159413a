#!/usr/bin/env python3
"""Measures torch.nn.attention.activate_flash_attention_impl("ACROMION") on a GPU: gpu_aten.py OUTPUT.json

Eager costs of PyTorch's own call beside acromion.sdpa, whole models with PyTorch unchanged but that line, and a
training run's losses. Compared in turns in one process, as gpu_python.py does. tools/gpu-python.sh prepares it."""
import contextlib
import json
import pathlib
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

import acromion
from gpu_python import back_to_back, host_time, normal, provenance
from turns import SEED, in_turns, interval, ratio, summarise

acromion.register_torch()


@contextlib.contextmanager
def active():
    activate_flash_attention_impl("ACROMION")
    try:
        yield
    finally:
        restore_flash_attention_impl()


def under(measure):
    def run():
        with active():
            return measure()
    return run


def above(values, baseline):
    added = [value - other for value, other in zip(values, baseline)]
    return {"above_us": statistics.median(added), "above_ci95_us": interval(added)}


def eager():
    sdpa, theirs = acromion.sdpa, F.scaled_dot_product_attention
    for problem, shape in (("b2:h8:s512:d64", (2, 8, 512, 64)), ("b1:h8:s128:d64", (1, 8, 128, 64))):
        q = normal(*shape)
        served = host_time(lambda: theirs(q, q, q), 100)
        dropped = host_time(lambda: theirs(q, q, q, dropout_p=0.1), 100)
        measures = {"acromion, lse": host_time(lambda: sdpa(q, q, q, return_lse=True), 100), "torch": served,
                    "torch, ACROMION": under(served), "torch, dropout": dropped,
                    "torch, dropout, ACROMION": under(dropped)}
        in_turns(measures, 3)
        found = in_turns(measures, 30)
        for name, values in found.items():
            record = {"what": "aten-eager", "problem": problem, "mode": "host", "contender": name, **summarise(values)}
            if name == "torch, ACROMION":
                record |= above(values, found["acromion, lse"]) | ratio(found["torch"], values)
            if name == "torch, dropout, ACROMION":
                record |= above(values, found["torch, dropout"])
            yield record


class DiffusionBlock(torch.nn.Module):
    """Of a UNet: convolutions, attention between places, attention to a prompt of 77 tokens, a gated linear layer."""

    def __init__(self, width, heads, prompt):
        super().__init__()
        self.heads = heads
        self.convolve = torch.nn.Sequential(
            torch.nn.GroupNorm(32, width), torch.nn.SiLU(), torch.nn.Conv2d(width, width, 3, padding=1),
            torch.nn.GroupNorm(32, width), torch.nn.SiLU(), torch.nn.Conv2d(width, width, 3, padding=1))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.q = torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(width, width, bias=False)
        self.kv = torch.nn.Linear(prompt, 2 * width, bias=False)
        self.outs = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.wide, self.narrow = torch.nn.Linear(width, 8 * width), torch.nn.Linear(4 * width, width)

    def attend(self, *tensors):
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in tensors)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, image, prompt):
        image = image + self.convolve(image)
        x = image.flatten(2).transpose(1, 2)
        x = x + self.outs[0](self.attend(*self.qkv(self.norms[0](x)).chunk(3, -1)))
        x = x + self.outs[1](self.attend(self.q(self.norms[1](x)), *self.kv(prompt).chunk(2, -1)))
        gate, up = self.wide(self.norms[2](x)).chunk(2, -1)
        return (x + self.narrow(F.gelu(gate) * up)).transpose(1, 2).reshape(image.shape)


def models():
    from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel
    torch.manual_seed(SEED)
    vit = ViTModel(ViTConfig(attn_implementation="sdpa")).to("cuda", torch.float16).eval()
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=1000, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096,
        intermediate_size=8192, max_position_embeddings=8192, attn_implementation="sdpa")).to(
            "cuda", torch.bfloat16).eval()
    block = DiffusionBlock(320, 8, 768).to("cuda", torch.float16, memory_format=torch.channels_last).eval()
    images, tokens = normal(64, 3, 224, 224), torch.randint(1000, (1, 8192), device="cuda")
    latent, prompt = normal(8, 320, 64, 64).to(memory_format=torch.channels_last), normal(8, 77, 768)
    calls = {
        "ViT-B/16, float16, batch 64": lambda: vit(images)[0],
        "Llama-like decoder, bfloat16, 4 layers of 4096, 32/8 heads of 128, 8192 tokens":
            lambda: llama(tokens, use_cache=False)[0],
        "UNet-like block, float16, batch 8, 64 x 64 places, 8 heads of 40, prompt of 77": lambda: block(latent, prompt),
    }
    for problem, call in calls.items():
        wanted = call()
        with active():
            found, handed_over = call(), acromion.fallbacks()
        measure = back_to_back(call, 5)
        measures = {"torch": measure, "torch, ACROMION": under(measure)}
        in_turns(measures, 1)
        values = in_turns(measures, 8)
        for name in measures:
            record = {"what": "aten-models", "mode": "back-to-back", "contender": name, "problem": problem,
                      **summarise(values[name])}
            if name == "torch, ACROMION":
                record |= ratio(values["torch"], values[name]) | {
                    "max_difference": (found.float() - wanted.float()).abs().max().item(),
                    "largest": wanted.abs().max().item(), "handed_over": handed_over}
            yield record


def losses(steps):
    """Of a decoder in bfloat16 that learns one batch."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=1000, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, hidden_size=512,
        intermediate_size=1024, attn_implementation="sdpa")).to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    tokens = torch.randint(1000, (8, 512), generator=torch.Generator().manual_seed(SEED)).cuda()
    found = []
    for _ in range(steps):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def training():
    with torch.enable_grad():
        native, again = losses(60), losses(60)
        with active():
            ours, handed_over = losses(60), acromion.fallbacks()
    yield {"what": "aten-training", "mode": "values", "contender": "torch, ACROMION",
           "problem": "Llama-like decoder, bfloat16, 4 layers of 512, 8/4 heads of 64, 8 x 512 tokens, AdamW",
           "n": len(ours), "losses_torch": native, "losses": ours, "handed_over": handed_over,
           "max_difference": max(abs(a - b) for a, b in zip(native, ours)),
           "max_difference_torch_again": max(abs(a - b) for a, b in zip(native, again))}


def main():
    output, common = pathlib.Path(sys.argv[1]), provenance()
    records, broken = [], []
    with torch.no_grad():
        for part in (eager, models, training):
            try:
                for record in part():
                    records.append(record | common)
                    print(json.dumps(record), flush=True)
            except Exception as error:  # the other parts still tell something
                broken.append(f"{part.__name__}: {type(error).__name__}: {error}")
            output.write_text(json.dumps(records, indent=1) + "\n")
    if broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
