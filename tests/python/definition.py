"""acromion.sdpa by its definition (include/acromion.h, "What a row sees, and what becomes of a score"), in float64 and
with every score in memory. NumPy only."""
import numpy as np


def visible(q_len, kv_len, is_causal=False, causal_align=None, window=None, chunk=None, kv_lens=None, kv_starts=None,
            ranges=None, tree=None, batch=1):
    """[batch, 1, q_len, kv_len]: which keys a query sees."""
    def each(values, default):
        values = np.full(batch, default) if values is None else np.asarray(values).astype(np.int64)
        return values[:, None, None]
    ends = each(kv_lens, kv_len).clip(0, kv_len)
    starts = np.minimum(each(kv_starts, 0).clip(0), ends)
    key, row = np.arange(kv_len), np.arange(q_len)[:, None]
    stands = row + (0 if causal_align == "top_left" else ends - q_len)
    left, right = window if isinstance(window, (tuple, list)) else (window, None)
    seen = np.ones((batch, q_len, kv_len), bool)
    if is_causal:
        seen &= key <= stands
    if left is not None:
        seen &= key > stands - left
    if right is not None and not is_causal:
        seen &= key <= stands + right
    if chunk is not None:
        seen &= (key - starts) // chunk == (stands - starts) // chunk
    for first, end in [] if ranges is None else np.asarray(ranges).astype(np.int64).transpose(1, 2, 0):
        first, end = first[:, None, None], end[:, None, None]
        seen |= (stands >= first) & (stands < end) & (key >= first) & (key < end)
    if tree is not None:
        bit = key - (ends - q_len)
        inside = (bit >= 0) & (bit < q_len)
        place = np.broadcast_to(bit.clip(0, q_len - 1), (batch, q_len, kv_len))
        byte = np.take_along_axis(np.asarray(tree).astype(np.int64), place // 8, 2)
        seen &= ~inside | ((byte >> (place % 8)) & 1).astype(bool)
    return (seen & (key < ends) & (key >= starts))[:, None]


def attention(q, k, v, attn_mask=None, dropout_p=0.0, scale=None, softcap=None, sinks=None, alibi_slopes=None,
              enable_gqa=True, **limits):
    """(output, log-sum-exp) of [batch, heads, length, dim]; the log-sum-exp of a row without keys or sink is -inf."""
    assert dropout_p == 0
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2]
    if limits.get("is_causal") and limits.get("causal_align") is None and q_len == kv_len:
        limits["causal_align"] = "bottom_right"
    k, v = (np.repeat(np.asarray(x, np.float64), heads // k.shape[1], axis=1) for x in (k, v))
    scores = (dim ** -0.5 if scale is None else scale) * (np.asarray(q, np.float64) @ k.swapaxes(2, 3))
    seen = visible(q_len, kv_len, batch=batch, **limits)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if attn_mask is not None and attn_mask.dtype == bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores = scores + np.asarray(attn_mask, np.float64)
    if alibi_slopes is not None:
        lens = limits.get("kv_lens")
        ends = np.full(batch, kv_len) if lens is None else np.asarray(lens).astype(np.int64)
        stands = np.arange(q_len) + (0 if limits.get("causal_align") == "top_left" else ends[:, None] - q_len)
        distance = np.abs(np.broadcast_to(stands, (batch, q_len))[:, None, :, None] - np.arange(kv_len))
        scores = scores - np.asarray(alibi_slopes, np.float64)[:, None, None] * distance
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (batch, heads, q_len, 1))
        scores = np.concatenate([scores, sink], -1)
    top = scores.max(-1, keepdims=True)
    top = np.where(top == -np.inf, 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return (weights[..., :kv_len] / np.where(total == 0, 1, total)) @ v, lse
