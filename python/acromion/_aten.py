"""PyTorch's own attention by acromion: torch.nn.attention.activate_flash_attention_impl("ACROMION") puts acromion below
the operators that scaled_dot_product_attention chooses from, and varlen_attn's; restore_flash_attention_impl takes it
out again. What acromion does not serve goes to the kernel that ATen had there, by name, and is counted. The operators
themselves are in aten.c."""
import functools
import math
import threading
import warnings
from typing import Dict, List, Tuple

import torch
import torch.nn.attention

from . import _native, _torch
from ._errors import UnsupportedError

NAME = "ACROMION"
OPERATORS = (
    ("_scaled_dot_product_flash_attention_for_cpu", "CPU"),
    ("_scaled_dot_product_flash_attention", "CUDA"),
    ("_scaled_dot_product_cudnn_attention", "CUDA"),
    ("_scaled_dot_product_efficient_attention", "CUDA"),
    ("_flash_attention_forward", "CUDA"),
)
REASONS_MAX = 1000  # texts hold sizes: a program of endlessly many must not fill memory
_handed_over: Dict[Tuple[str, str], int] = {}
_is_strict = False


# ---- What aten.c asks for ----

def _unused(like: torch.Tensor) -> torch.Tensor:
    """The tensor that all calls on a device return for a random state. Another thread makes it: on this one the
    allocator may be told to take everything from the memory of a CUDA graph."""
    made: List[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.empty((), dtype=torch.int64, device=like.device)))
    thread.start()
    thread.join()
    return made[0]


def _pad_rows(lse: torch.Tensor, rows: int) -> torch.Tensor:
    """Infinite, as efficient attention's backward wants to find rows that are none."""
    return torch.nn.functional.pad(lse, (0, rows), value=math.inf)


def _heads_innermost(lse: torch.Tensor) -> torch.Tensor:
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def _without_keys(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill_(lse == -math.inf, math.inf)


# ---- Handing over ----

def _tell(name: str, reason: str) -> None:
    """Of a call that goes to ATen's own kernel."""
    if _is_strict:
        raise UnsupportedError(f"aten::{name}: acromion does not serve {reason}", -2)
    count = _handed_over.get((name, reason))
    if count is None and len(_handed_over) >= REASONS_MAX:
        reason = "other reasons"
        count = _handed_over.get((name, reason))
    _handed_over[name, reason] = (count or 0) + 1


# ---- Activating ----

@functools.lru_cache(maxsize=None)
def _bind() -> None:
    _torch.bind()
    _native.bind_aten(_unused, _pad_rows, _heads_innermost, _without_keys)


class Handle:
    """What PyTorch's registry keeps while acromion is active."""

    def __init__(self) -> None:
        _bind()
        self.library = torch.library.Library("aten", "IMPL")
        for name, key in OPERATORS:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                continue  # a PyTorch without CUDA
            native = torch.library.get_kernel(f"aten::{name}", key)  # before it is overridden
            operator = _native.aten_operator(name, native.call_boxed, functools.partial(_tell, name))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
                self.library.impl(name, operator, key, with_keyset=True, allow_override=True)

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
