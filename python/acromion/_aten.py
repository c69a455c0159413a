"""PyTorch's own attention by acromion: torch.nn.attention.activate_flash_attention_impl("ACROMION") puts acromion below
the operators that scaled_dot_product_attention chooses from; restore_flash_attention_impl takes it out again. What
acromion does not serve goes to the kernel that ATen had there, by name, and is counted."""
import collections
import functools
import math
import warnings
from typing import Any, Callable, Dict, Tuple

import torch
import torch.nn.attention

from . import _native, _torch
from ._errors import Error, UnsupportedError

NAME = "ACROMION"
_handed_over: "collections.Counter[Tuple[str, str]]" = collections.Counter()
_is_strict = False


class _NotServed(Exception):
    """Why a call is ATen's."""


# ---- One function for each operator: its arguments, its results ----

def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any, dropout_p: float,
            is_causal: bool, scale: Any, wants_lse: bool, out: Any = None) -> Any:
    """Output, or output and log-sum-exp [batch, heads, queries]. Causal is PyTorch's rule: query i sees keys 0..i."""
    if attn_bias is not None:
        raise _NotServed("a mask or bias")
    if dropout_p != 0:
        raise _NotServed("dropout")
    if query.is_cuda and query.dtype == torch.float32:
        raise _NotServed("float32 on CUDA: acromion has kernels of last resort for it only")
    try:
        return _native.run(query, key, value, is_causal=is_causal, causal_align="top_left" if is_causal else None,
                           scale=scale, enable_gqa=True, return_lse=wants_lse, out=out)
    except (Error, TypeError) as error:
        if isinstance(error, Error) and not isinstance(error, (ValueError, NotImplementedError)):
            raise  # a device that failed, memory that ran out: no other kernel would mend that
        raise _NotServed(str(error)) from error


def _for_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
             is_causal: bool = False, *, attn_mask: Any = None, scale: Any = None) -> Any:
    out, lse = _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, True)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)  # where ATen has it in memory


def _check_like_query(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool,
                      return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise _NotServed("a debug mask")
    if value.shape[-1] != query.shape[-1]:
        raise _NotServed("values of another head dim")
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise _NotServed("causal with unequal lengths, where ATen's kernels differ in what they mean")


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
           is_causal: bool = False, return_debug_mask: bool = False, *, scale: Any = None) -> Any:
    _check_like_query(query, key, value, is_causal, return_debug_mask)
    out, lse = _attend(query, key, value, None, dropout_p, is_causal, scale, True)
    return (out, lse, None, None, query.shape[2], key.shape[2], query.new_empty(2, dtype=torch.uint64),
            query.new_empty((), dtype=torch.uint64), query.new_empty(0))


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any, compute_log_sumexp: bool,
           dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
           scale: Any = None) -> Any:
    _check_like_query(query, key, value, is_causal, return_debug_mask)
    result = _attend(query, key, value, attn_bias, dropout_p, is_causal, scale, compute_log_sumexp)
    out, lse = result if compute_log_sumexp else (result, None)
    return (out, None if lse is None else lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2],
            query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64), None)


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any, compute_log_sumexp: bool,
               dropout_p: float = 0.0, is_causal: bool = False, *, scale: Any = None) -> Any:
    batch, heads, rows, _ = query.shape
    out = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
    padded = query.new_empty((batch, heads, 32 * math.ceil(rows / 32) if compute_log_sumexp else 0),
                             dtype=torch.float32)
    result = _attend(query, key, value, attn_bias, dropout_p, is_causal, scale, compute_log_sumexp, out)
    if compute_log_sumexp:
        padded[..., :rows] = result[1]
        padded[..., rows:] = math.inf  # as its backward wants to find rows that are none
    return (out, padded, query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64))


OPERATORS: Dict[Tuple[str, str], Callable[..., Any]] = {
    ("_scaled_dot_product_flash_attention_for_cpu", "CPU"): _for_cpu,
    ("_scaled_dot_product_flash_attention", "CUDA"): _flash,
    ("_scaled_dot_product_cudnn_attention", "CUDA"): _cudnn,
    ("_scaled_dot_product_efficient_attention", "CUDA"): _efficient,
}


# ---- Activating ----

def _serve(name: str, native: Any, function: Callable[..., Any], keys: Any, *args: Any, **keywords: Any) -> Any:
    """What runs for an operator while acromion is active."""
    try:
        return function(*args, **keywords)
    except _NotServed as reason:
        if _is_strict:
            raise UnsupportedError(f"aten::{name}: acromion does not serve {reason}", -2) from reason
        _handed_over[name, str(reason)] += 1
    return native.call_boxed(keys, *args, **keywords)


class Handle:
    """What PyTorch's registry keeps while acromion is active."""

    def __init__(self) -> None:
        _torch.bind()
        self.library = torch.library.Library("aten", "IMPL")
        for (name, key), function in OPERATORS.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                continue  # a PyTorch without CUDA
            native = torch.library.get_kernel(f"aten::{name}", key)  # before it is overridden
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
                self.library.impl(name, functools.partial(_serve, name, native, function), key, with_keyset=True,
                                  allow_override=True)

    def remove(self) -> None:
        self.library._destroy()


def activate() -> Handle:
    """Puts acromion below the operators; what PyTorch's registry calls."""
    _handed_over.clear()
    return Handle()


def register(strict: bool = False) -> None:
    """Makes the name known to PyTorch's registry. Activates nothing."""
    global _is_strict
    _is_strict = strict
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)


def fallbacks() -> Dict[str, int]:
    """Calls handed over to ATen since acromion was activated last: "operator: reason" and how many."""
    return {f"{name}: {reason}": count for (name, reason), count in _handed_over.items()}
