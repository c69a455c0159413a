"""A model that calls PyTorch's own attention, before and after the one line: how far its outputs are apart, and how
long it takes. On the GPU where there is one, in fp16; else on the CPU in fp32."""
import statistics
import time

import torch
import torch.nn.functional as F

import acromion

HEADS, DIM = 8, 512
device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def seconds(model, x):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    output = model(x)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, output


torch.manual_seed(1)
dtype = torch.float16 if device == "cuda" else torch.float32
model = torch.nn.Sequential(*(Attention() for _ in range(4))).to(device, dtype).eval()
x = torch.randn(2, 512, DIM, device=device, dtype=dtype)
times = {"PyTorch": [], "acromion": []}
with torch.inference_mode():
    for round in range(12):  # in turns, so that a busy machine slows both; the first rounds warm up
        ours, theirs = None, None
        for name in times:
            if name == "acromion":
                torch.nn.attention.activate_flash_attention_impl("ACROMION")
            taken, output = seconds(model, x)
            if name == "acromion":
                torch.nn.attention.restore_flash_attention_impl()
                ours = output
            else:
                theirs = output
            if round >= 2:
                times[name].append(taken)
error = (ours - theirs).abs().max().item()
torch.testing.assert_close(ours, theirs, atol=2e-2 if device == "cuda" else 1e-4, rtol=1e-2)
assert not acromion.fallbacks(), acromion.fallbacks()
middle = {name: statistics.median(taken) for name, taken in times.items()}
print(f"{acromion.__version__} on {device}: the model takes {middle['PyTorch'] * 1e3:.2f} ms with PyTorch's attention, "
      f"{middle['acromion'] * 1e3:.2f} ms with acromion's; outputs differ by at most {error:.1e}")
