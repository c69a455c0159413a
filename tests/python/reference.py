"""acromion.sdpa by its definition (include/acromion.h, "What a row sees, and what becomes of a score"), in float64 and
with every score in memory."""
import torch


def visible(q_len, kv_len, is_causal=False, causal_align=None, window=None, chunk=None, kv_lens=None, kv_starts=None,
            ranges=None, tree=None, batch=1, device="cpu"):
    """[batch, 1, q_len, kv_len]: which keys a query sees."""
    def each(values, default):
        values = torch.full((batch,), default, device=device) if values is None else values.to(device).long()
        return values[:, None, None]
    ends = each(kv_lens, kv_len).clamp(0, kv_len)
    starts = torch.minimum(each(kv_starts, 0).clamp(min=0), ends)
    key = torch.arange(kv_len, device=device)
    row = torch.arange(q_len, device=device)[:, None]
    stands = row + (0 if causal_align == "top_left" else ends - q_len)
    left, right = window if isinstance(window, (tuple, list)) else (window, None)
    seen = torch.ones(batch, q_len, kv_len, dtype=torch.bool, device=device)
    if is_causal:
        seen &= key <= stands
    if left is not None:
        seen &= key > stands - left
    if right is not None and not is_causal:
        seen &= key <= stands + right
    if chunk is not None:
        seen &= (torch.div(key - starts, chunk, rounding_mode="floor")
                 == torch.div(stands - starts, chunk, rounding_mode="floor"))
    for first, end in [] if ranges is None else ranges.to(device).long().permute(1, 2, 0):
        first, end = first[:, None, None], end[:, None, None]
        seen |= (stands >= first) & (stands < end) & (key >= first) & (key < end)
    if tree is not None:
        bit = key - (ends - q_len)
        inside = (bit >= 0) & (bit < q_len)
        place = bit.clamp(0, q_len - 1).expand(batch, q_len, kv_len)
        byte = tree.to(device).long().gather(2, place // 8)
        seen &= ~inside | ((byte >> (place % 8)) & 1).bool()
    return (seen & (key < ends) & (key >= starts))[:, None]


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
