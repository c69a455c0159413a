"""PyTorch's own attention by acromion: torch.nn.attention.activate_flash_attention_impl("ACROMION") puts acromion below
the operators that scaled_dot_product_attention chooses from, and varlen_attn's; restore_flash_attention_impl takes it
out again. What acromion does not serve goes to the kernel that ATen had there, by name, and is counted. The operators
themselves are in aten.c."""
import functools
import math
import threading
import warnings
from typing import Any, Callable, Dict, List, Optional

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


class _Raising(torch.Tensor):
    """Of which every operator raises the exception of a call that the dispatcher made: C can throw none itself."""

    @staticmethod
    def __new__(cls) -> "_Raising":
        return torch.Tensor._make_wrapper_subclass(cls, ())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        _native.aten_stack_raise()


@functools.lru_cache(maxsize=None)
def _has_stack() -> bool:
    return _native.aten_stack_bind(_Raising())


_LETTERS = {"Tensor": "T", "Optional[Tensor]": "t", "bool": "b", "int": "i", "Optional[int]": "j", "float": "f",
            "Optional[float]": "g"}


def _register_directly(name: str, key: str, operator: Callable[..., Any]) -> Optional[object]:
    """Puts an operator where PyTorch's dispatcher calls it without its way through Python. Gives what keeps it there,
    or None where this PyTorch has not all that this takes, has other arguments, or where acromion is active twice."""
    schema = torch._C._get_schema(f"aten::{name}", "")
    arguments, results = ([_LETTERS.get(str(value.type)) for value in values]
                          for values in (schema.arguments, schema.returns))
    keywords = tuple(value.name for value in schema.arguments if value.kwarg_only)
    if None in arguments + results or not _has_stack():
        return None
    return _native.aten_stack_register(name, key, operator, "".join(filter(None, arguments)), keywords,
                                       "".join(filter(None, results)))


class Handle:
    """What PyTorch's registry keeps while acromion is active."""

    def __init__(self) -> None:
        _bind()
        self.library = torch.library.Library("aten", "IMPL")
        self.direct: List[Optional[object]] = []  # in front of those
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
            self.direct.append(_register_directly(name, key, operator))

    def remove(self) -> None:
        self.direct.clear()
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
