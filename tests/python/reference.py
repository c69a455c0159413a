"""acromion.sdpa by its definition on PyTorch's tensors, through which gradients flow: visibility is definition.py's,
scores are PyTorch's, in float64 and all in memory."""
import definition
import torch


def visible(*lengths, device="cpu", **limits):
    """[batch, 1, q_len, kv_len]: which keys a query sees."""
    plain = {name: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for name, x in limits.items()}
    return torch.from_numpy(definition.visible(*lengths, **plain)).to(device)


def attention(q, k, v, attn_mask=None, dropout_p=0.0, scale=None, softcap=None, sinks=None, alibi_slopes=None,
              enable_gqa=True, **limits):
    """(output, log-sum-exp) of [batch, heads, length, dim]; the log-sum-exp of a row without keys or sink is -inf."""
    assert dropout_p == 0
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2]
    if limits.get("is_causal") and limits.get("causal_align") is None and q_len == kv_len:
        limits["causal_align"] = "bottom_right"
    k, v = (x.double().repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    scores = (dim ** -0.5 if scale is None else scale) * (q.double() @ k.transpose(2, 3))
    seen = visible(q_len, kv_len, batch=batch, device=q.device, **limits)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    if alibi_slopes is not None:
        lens = limits.get("kv_lens")
        ends = torch.full((batch,), kv_len) if lens is None else lens.long().cpu()
        stands = torch.arange(q_len) + (0 if limits.get("causal_align") == "top_left" else ends[:, None] - q_len)
        distance = (stands[:, None, :, None] - torch.arange(kv_len)).abs().to(q.device)
        scores = scores - alibi_slopes.double()[:, None, None] * distance
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(batch, heads, q_len, 1)
        scores = torch.cat([scores, sink], -1)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0, lse)[..., None])[..., :kv_len]
    return weights @ v, lse
