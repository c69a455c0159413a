"""acromion.merge and acromion.append: the operations beside attention. docs/manual/append-and-merge.md says what they
compute; here are the arguments' defaults and the outputs."""
from typing import Any, Optional, Sequence, Tuple, Union

from . import _native

_LAYOUTS = {"bhsd": 0, "bshd": 1}  # acr_layout


def _layout(layout: str) -> int:
    if layout not in _LAYOUTS:
        raise ValueError(f"layout is {layout!r}, must be 'bhsd' or 'bshd'")
    return _LAYOUTS[layout]


def _empty_like(array: Any, name: str) -> Any:
    """A new array of the same library."""
    module = type(array).__module__.partition(".")[0]
    if module == "torch":
        import torch
        return torch.empty_like(array)
    if module == "numpy":
        import numpy
        return numpy.empty_like(array)
    raise TypeError(f"{name} is missing: only for PyTorch's tensors and NumPy's arrays is it made")


def _refuse_grad(*arrays: Any) -> None:
    if any(getattr(array, "requires_grad", False) for array in arrays):
        import torch
        if torch.is_grad_enabled():
            raise NotImplementedError("a tensor requires a gradient, and this has none: call under torch.no_grad(), or "
                                      "give tensors from .detach()")


def merge(outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bhsd", out: Optional[Any] = None,
          out_lse: Optional[Any] = None) -> Tuple[Any, Any]:
    """Joins attention over parts of the keys into attention over all of them: returns (out, lse).

    outs, lses: what sdpa(..., return_lse=True) gives for each part: float16, bfloat16 or float32 [batch, heads, length,
        dim] in one type and with equal strides, and float32 [batch, heads, length] (packed: [total, heads, dim] and
        [heads, total]).
    out: where the result goes, of any of those types; may be outs[0]. None makes one like outs[0].
    out_lse: likewise; may be lses[0]."""
    if len(outs) < 1:
        raise ValueError("outs is empty, must have at least one part")
    _refuse_grad(*outs, *lses, out, out_lse)
    if out is None:
        out = _empty_like(outs[0], "out")
    if out_lse is None:
        out_lse = _empty_like(lses[0], "out_lse")
    _native.merge(list(outs), list(lses), out, out_lse, _layout(layout))
    return out, out_lse


def append(k: Optional[Any], v: Optional[Any], k_cache: Optional[Any], v_cache: Optional[Any], kv_lens: Any, *,
           q: Optional[Any] = None, q_out: Optional[Any] = None, cos: Optional[Any] = None, sin: Optional[Any] = None,
           interleaved: bool = False, rope_first: int = 0, offsets: Optional[Any] = None,
           page_table: Optional[Any] = None, rope_offsets: Optional[Any] = None, rope_positions: Optional[Any] = None,
           k_scale: Union[None, float, Any] = None, v_scale: Union[None, float, Any] = None,
           layout: str = "bhsd") -> Optional[Any]:
    """Writes new rows of k and v to their caches, rotating k and q on the way; returns the rotated q, or None.

    k, v: [batch, heads, length, dim], float16, bfloat16 or float32; with offsets [total, heads, dim].
    k_cache, v_cache: [batch, heads, positions, dim]; with page_table [pages, heads, page, dim]. Of k's type, another of
        those or float8_e4m3fn.
    kv_lens: int32 [batch]: lengths after the append. The last new token of a sequence goes to kv_lens[b] - 1.
    offsets: int32 [batch + 1]: sequence b has rows offsets[b] to offsets[b + 1] of k, v and q.
    page_table: int32 [batch, pages of a sequence].
    cos, sin: float32 [positions, rotated elements / 2]: pairs are halves of what is rotated, or if interleaved
        neighbours. It begins at element rope_first.
    rope_offsets: int32 [batch], added to the positions that rotate; rope_positions: int32 [batch, length] or [total],
        in place of those in the cache.
    q, q_out: rotated, too; None makes q_out like q, and it may be q.
    k_scale, v_scale: with float8_e4m3fn caches a number, or a float32 tensor [batch, heads].
    layout: 'bshd' for [batch, length, heads, dim] and [pages, page, heads, dim]."""
    _refuse_grad(k, v, k_cache, v_cache, q, q_out)
    if q is not None and q_out is None:
        q_out = _empty_like(q, "q_out")
    numbers, scales = [], []
    for scale in (k_scale, v_scale):
        is_number = scale is None or isinstance(scale, (int, float))
        numbers.append(float(scale or 0) if is_number else 0.0)
        scales.append(None if is_number else scale)
    _native.append((k, v, k_cache, v_cache, kv_lens, q, q_out, cos, sin, offsets, page_table, rope_offsets,
                    rope_positions, *scales), (_layout(layout), int(interleaved), rope_first, *numbers))
    return q_out
