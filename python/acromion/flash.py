"""FlashAttention's functions by acromion's kernels: in place of `from flash_attn import …`

    from acromion.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Arguments have flash-attn 2's names, places and meanings; docs/manual/flash.md says where the two differ. What acromion
does not compute is refused by the argument's name, never handed to another implementation."""
from typing import Any, Optional, Tuple, Union

import torch

from ._api import append, sdpa, sdpa_paged

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Window = Tuple[int, int]
Result = Any  # a tensor, or a tuple that begins with it


def _refuse(name: str, value: Any, allowed: str) -> None:
    raise NotImplementedError(f"{name} is {value!r}, must be {allowed}")


def _rows(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """A tensor whose rows lie side by side, copied where they do not."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _scores(softmax_scale: Optional[float], causal: bool, window_size: Window, softcap: float,
            alibi_slopes: Optional[torch.Tensor], s_aux: Optional[torch.Tensor]) -> Any:
    """sdpa's arguments for what all functions here have. A window counts the keys beside a query's own."""
    left, right = (None if side < 0 else side for side in window_size)
    if alibi_slopes is not None and alibi_slopes.ndim != 1:
        _refuse("alibi_slopes", tuple(alibi_slopes.shape), "of one dimension, heads: the batch shares them")
    is_causal = causal or right == 0
    limits = (None if left is None else left + 1, None if is_causal else right)
    return {"scale": softmax_scale, "is_causal": is_causal, "causal_align": "bottom_right" if is_causal else None,
            "window": None if limits == (None, None) else limits, "softcap": softcap or None,
            "alibi_slopes": alibi_slopes, "sinks": None if s_aux is None else s_aux.float(), "enable_gqa": True,
            "layout": "bshd"}


def _with_probabilities(result: Any, wanted: bool) -> Result:
    """FlashAttention's third result is of dropout alone."""
    return (*result, None) if wanted else result


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                    softmax_scale: Optional[float] = None, causal: bool = False, window_size: Window = (-1, -1),
                    softcap: float = 0.0, alibi_slopes: Optional[torch.Tensor] = None, deterministic: bool = False,
                    return_attn_probs: bool = False, *, s_aux: Optional[torch.Tensor] = None) -> Result:
    """Attention of [batch, length, heads, dim]; the heads of k and v divide those of q. With causal the last query sees
    the last key. Gradients flow where acromion.sdpa has them.

    window_size: (left, right), keys that a query sees before and behind its own; -1 for no limit.
    deterministic: nothing to ask for: runs give the same bits.
    return_attn_probs: returns (out, log-sum-exp [batch, heads, length], None).
    s_aux: sinks [heads of q], as vLLM's version calls them."""
    if dropout_p:
        _refuse("dropout_p", dropout_p, "0: nothing is ever dropped")
    result = sdpa(_rows(q), _rows(k), _rows(v), return_lse=return_attn_probs,
                  **_scores(softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux))
    return _with_probabilities(result, return_attn_probs)


def _longest(number: Any) -> Any:
    return max(number.item() if isinstance(number, torch.Tensor) else number, 1)


def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: Optional[float] = None, causal: bool = False,
                           window_size: Window = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Optional[torch.Tensor] = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Optional[torch.Tensor] = None, *,
                           s_aux: Optional[torch.Tensor] = None) -> Result:
    """Attention of packed sequences [total, heads, dim]: sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of
    q, and likewise of k and v. Offsets are int32. With return_attn_probs the log-sum-exp is [heads, total].

    block_table: int32 [sequences, pages]; k and v are pages [pages, page, heads, dim] then, and cu_seqlens_k says how
        many keys each sequence has."""
    if dropout_p:
        _refuse("dropout_p", dropout_p, "0: nothing is ever dropped")
    scores = _scores(softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    q_lens = {"q_offsets": cu_seqlens_q, "max_q_len": _longest(max_seqlen_q)}
    if block_table is None:
        result = sdpa(_rows(q), _rows(k), _rows(v), kv_offsets=cu_seqlens_k, max_kv_len=_longest(max_seqlen_k),
                      return_lse=return_attn_probs, **q_lens, **scores)
    else:
        room = block_table.shape[1] * k.shape[1]
        result = sdpa_paged(_rows(q), _rows(k), _rows(v), block_table, cu_seqlens_k.diff(),
                            max_kv_len=min(_longest(max_seqlen_k), room), return_lse=return_attn_probs, **q_lens,
                            **scores)
    return _with_probabilities(result, return_attn_probs)


def _append(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
            before: torch.Tensor, table: Optional[torch.Tensor], rotary: Any, rotates_rows: bool) -> torch.Tensor:
    """Writes k and v behind the keys that there are, and returns q, rotated where that is asked for. q's rows rotate
    by the positions from the first new key's on, or without a causal mask all of them by that one."""
    after = before + k.shape[1]
    where = {"page_table": table, "layout": "bshd"}
    if not rotary:
        append(_rows(k), _rows(v), k_cache, v_cache, after, **where)
        return q
    if rotates_rows and q.shape[1] == k.shape[1]:
        return append(_rows(k), _rows(v), k_cache, v_cache, after, q=_rows(q), **rotary, **where)
    append(_rows(k), _rows(v), k_cache, v_cache, after, **rotary, **where)
    steps = torch.arange(q.shape[1], device=q.device, dtype=torch.int32) * int(rotates_rows)
    positions = before[:, None] + steps
    return append(None, None, None, None, after, q=_rows(q), rope_positions=positions, layout="bshd", **rotary)


def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                            k: Optional[torch.Tensor] = None, v: Optional[torch.Tensor] = None,
                            rotary_cos: Optional[torch.Tensor] = None, rotary_sin: Optional[torch.Tensor] = None,
                            cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
                            cache_batch_idx: Optional[torch.Tensor] = None,
                            cache_leftpad: Optional[torch.Tensor] = None,
                            block_table: Optional[torch.Tensor] = None, softmax_scale: Optional[float] = None,
                            causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Optional[torch.Tensor] = None,
                            num_splits: int = 0, return_softmax_lse: bool = False, *,
                            s_aux: Optional[torch.Tensor] = None) -> Result:
    """Attention of q [batch, length, heads, dim] over a cache; k and v, where given, are written to it first.

    k_cache, v_cache: [entries, positions, heads, dim], with block_table [pages, page, heads, dim].
    k, v: [batch, new, heads, dim], written in place from position cache_seqlens[b] on.
    cache_seqlens: int32 [batch], or a number: keys in the cache before k is written. None: all positions.
    cache_batch_idx: int32 [batch]: which entry of the cache a sequence has.
    cache_leftpad: int32 [batch]: where a sequence's keys begin.
    block_table: int32 [batch, pages of a sequence].
    rotary_cos, rotary_sin: [positions, rotated elements / 2]: k and q rotate by their position in the cache; without
        causal and window all rows of q by that of the first new key.
    num_splits: 0, which leaves it to the planner.
    return_softmax_lse: returns (out, log-sum-exp [batch, heads, length])."""
    if num_splits != 0:
        _refuse("num_splits", num_splits, "0: the planner chooses")
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is missing: new keys and values come together")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin come together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is missing: it says where k and v are written")
    if k is None and rotary_cos is not None:
        raise ValueError("rotary_cos is given without k and v, whose positions say how far to rotate")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx is given with block_table, which says where a sequence's keys are")
    if block_table is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is missing: pages do not say how many keys a sequence has")
    table = block_table
    if cache_batch_idx is not None:  # an entry of the cache is one large page
        table = cache_batch_idx.to(torch.int32)[:, None]
        if cache_seqlens is None:
            cache_seqlens = k_cache.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    scores = _scores(softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    kv_lens = cache_seqlens
    if k is not None and v is not None and cache_seqlens is not None:
        rotary = {} if rotary_cos is None or rotary_sin is None else {
            "cos": rotary_cos.float().contiguous(), "sin": rotary_sin.float().contiguous(),
            "interleaved": rotary_interleaved}
        is_local = scores["is_causal"] or scores["window"] is not None
        q = _append(q, k, v, k_cache, v_cache, cache_seqlens, table, rotary, is_local)
        kv_lens = cache_seqlens + k.shape[1]
    scores.update(kv_starts=cache_leftpad, return_lse=return_softmax_lse)
    if table is not None:
        return sdpa_paged(_rows(q), k_cache, v_cache, table, kv_lens, **scores)
    return sdpa(_rows(q), k_cache, v_cache, kv_lens=kv_lens, **scores)
