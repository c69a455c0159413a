"""PyTorch's own attention by acromion: torch.nn.attention.activate_flash_attention_impl("ACROMION") puts acromion below
the operators that scaled_dot_product_attention chooses from, and varlen_attn's; restore_flash_attention_impl takes it
out again. What acromion does not serve goes to the kernel that ATen had there, by name, and is counted. The operators
themselves are in aten.c."""
import functools
import math
import threading
import warnings
from typing import Dict, List

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
_handed_over: Dict[str, Dict[str, int]] = {name: {} for name, _ in OPERATORS}  # reasons and calls of an operator
_earlier: Dict[str, int] = {}  # calls before it became strict
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
    """Of a call that goes to ATen's own kernel, the first for its reason: aten.c counts the others in the same place,
    where it finds the reason."""
    if _is_strict:
        raise UnsupportedError(f"aten::{name}: acromion does not serve {reason}", -2)
    counts = _handed_over.setdefault(name, {})
    if reason not in counts and sum(map(len, _handed_over.values())) >= REASONS_MAX:
        reason = "other reasons"
    counts[reason] = counts.get(reason, 0) + 1


def _forget_reasons() -> None:
    for counts in _handed_over.values():
        counts.clear()


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
            # A kernel of a backend looks at no other key than its own. Given here, the keys are no object of each call.
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
            operator = _native.aten_operator(name, native.call_boxed, keys, _handed_over[name],
                                             functools.partial(_tell, name))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
                self.library.impl(name, operator, key, allow_override=True)

    def remove(self) -> None:
        self.library._destroy()


def activate() -> Handle:
    """Puts acromion below the operators; what PyTorch's registry calls."""
    _forget_reasons()
    _earlier.clear()
    return Handle()


def register(strict: bool = False) -> None:
    """Makes the name known to PyTorch's registry. Activates nothing."""
    global _is_strict
    if strict:  # what is counted in C is not told
        _earlier.update(fallbacks())
        _forget_reasons()
    _is_strict = strict
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)


def fallbacks() -> Dict[str, int]:
    """Calls handed over to ATen since acromion was activated last: "operator: reason" and how many."""
    found = dict(_earlier)
    for name, counts in _handed_over.items():
        for reason, count in counts.items():
            text = f"{name}: {reason}"
            found[text] = found.get(text, 0) + count
    return found
