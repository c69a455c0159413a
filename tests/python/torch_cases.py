"""The table of cases on PyTorch's tensors: inputs, the float64 reference, and the verdict."""
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import acromion

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def make(case, generator, heads, length, dim, expands=False):
    """A tensor [batch, heads, length, dim] that lies in memory as the case's view says."""
    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DTYPES[case.dtype])
    if case.view == "transposed":
        return normal(case.batch, length, heads, dim).transpose(1, 2)
    if case.view == "sliced":
        return normal(case.batch, heads, length, dim + 8)
    if case.view == "expanded" and expands:
        return normal(1, heads, length, dim)
    if case.view == "offset":
        return normal(case.batch * heads * length * dim + 1)
    return normal(case.batch, heads, length, dim)


def place(case, base, heads, length, dim, device):
    """The view of `make`'s tensor on the device."""
    base = base.to(device)
    if case.view == "sliced":
        return base[..., :dim]
    if case.view == "expanded":
        return base.expand(case.batch, heads, length, dim)
    if case.view == "offset":
        return base[1:].view(case.batch, heads, length, dim)
    return base


def visible_keys(case, lens, device):
    """[batch, 1, q_len, kv_len]: which keys a query sees."""
    keys = torch.arange(case.kv_len, device=device)
    length = torch.full((case.batch,), case.kv_len, device=device) if lens is None else lens
    length = length[:, None, None, None]
    visible = (keys < length).expand(case.batch, 1, case.q_len, case.kv_len)
    if case.align:
        rows = torch.arange(case.q_len, device=device)[:, None]
        diagonal = 0 if case.align == "top_left" else length - case.q_len
        visible = visible & (keys <= rows + diagonal)
    return visible


def math_sdpa(case, q, k, v, visible):
    """SDPA's math backend; rows without a key are 0, as acromion has them, where it gives NaN."""
    group = case.q_heads // case.kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=case.scale)
    return torch.where(visible.any(-1, keepdim=True), out, 0)


def largest(tensor):
    return tensor.abs().max().item()


def check(case, device):
    """Runs one case. Returns (error, limit): the limit is twice the error of SDPA's math backend in the same dtype, and
    a rounding step of the largest output, in float32 four; both against that backend in float64 on the same inputs."""
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(case.q_heads, case.q_len, case.qk_dim), (case.kv_heads, case.kv_len, case.qk_dim),
              (case.kv_heads, case.kv_len, case.v_dim)]
    q, k, v = (place(case, make(case, generator, *shape, expands=True), *shape, device) for shape in shapes)
    lens = case.lens()
    lens = None if lens is None else torch.tensor(lens, dtype=torch.int32, device=device)
    given = [q, k, v] if case.layout == "bhsd" else [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = acromion.sdpa(*given, kv_lens=lens, **case.arguments())
    if case.layout == "bshd":
        out = out.transpose(1, 2)
    visible = visible_keys(case, lens, device)
    exact = math_sdpa(case, q.double(), k.double(), v.double(), visible)
    unfused = math_sdpa(case, q, k, v, visible)
    assert out.dtype == q.dtype and out.shape == exact.shape, (out.dtype, out.shape)
    steps = 4 if q.dtype == torch.float32 else 1  # sums of float32 in another order than the math backend's
    check_lse(case, q, k, visible, lse)
    limit = 2 * largest(unfused.double() - exact) + steps * torch.finfo(q.dtype).eps * largest(exact)
    return largest(out.double() - exact), limit


def check_lse(case, q, k, visible, lse):
    k = k.double().repeat_interleave(case.q_heads // case.kv_heads, dim=1)
    scores = (case.scale or case.qk_dim ** -0.5) * (q.double() @ k.transpose(2, 3))
    expected = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-4, atol=2e-4)
