"""The operators torch.ops.acromion.sdpa and .sdpa_out: what acromion.sdpa becomes under torch.compile, and the way
through PyTorch's dispatcher for tensor subclasses and dispatch modes. Plain eager calls never come here."""
from typing import Any, Optional, Tuple, Union

import torch

from . import _native

Result = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]

ARGUMENTS = ("Tensor q, Tensor k, Tensor v, *, bool is_causal=False, str? causal_align=None, float? scale=None, "
             "bool enable_gqa=False, Tensor? kv_lens=None, bool return_lse=False, str layout='bhsd'")
library = torch.library.Library("acromion", "DEF")


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    """An operator returns the same number of tensors always: without an lse wanted, an empty one."""
    return q.new_empty((0,), dtype=torch.float32)


def _compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False,
             **arguments: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    if return_lse:
        return _native.run(q, k, v, return_lse=True, **arguments)  # type: ignore[return-value]
    return _native.run(q, k, v, **arguments), _no_lse(q)  # type: ignore[return-value]


def _compute_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor,
                 **arguments: Any) -> torch.Tensor:
    return _compute(q, k, v, out=out, **arguments)[1]


def _lse_shape(q: torch.Tensor, layout: str) -> Tuple[int, int, int]:
    heads, rows = (2, 1) if layout == "bshd" else (1, 2)
    return q.shape[0], q.shape[heads], q.shape[rows]


def _fake_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, layout: str = "bhsd",
              **arguments: Any) -> torch.Tensor:
    return q.new_empty(_lse_shape(q, layout), dtype=torch.float32) if return_lse else _no_lse(q)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    # The same memory layout as sdpa.c gives: like q where the shape is q's, else packed.
    out = torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    return out, _fake_out(q, k, v, **arguments)


def _refuse_grad(*tensors: Optional[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError(
            "a tensor requires a gradient, and acromion computes the forward pass only: call under torch.no_grad() or "
            "torch.inference_mode(), or give tensors from .detach()")


def _define(name: str, extra_argument: str, result: str, compute: Any, fake: Any) -> None:
    library.define(f"{name}({ARGUMENTS}{extra_argument}) -> {result}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        library.impl(name, compute, key)
    torch.library.register_fake(f"acromion::{name}", fake, lib=library)
    operator = getattr(torch.ops.acromion, name).default

    def below_autograd(keyset: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        _refuse_grad(q, k, v, arguments.get("out"))
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, q, k, v, **arguments)

    library.impl(name, below_autograd, "Autograd", with_keyset=True)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False,
          causal_align: Optional[str] = None, scale: Optional[float] = None, enable_gqa: bool = False,
          kv_lens: Optional[torch.Tensor] = None, return_lse: bool = False, layout: str = "bhsd",
          out: Optional[torch.Tensor] = None) -> Result:
    """acromion.sdpa by the operators."""
    if out is None:
        out, lse = torch.ops.acromion.sdpa(
            q, k, v, is_causal=is_causal, causal_align=causal_align, scale=scale, enable_gqa=enable_gqa,
            kv_lens=kv_lens, return_lse=return_lse, layout=layout)
    else:
        lse = torch.ops.acromion.sdpa_out(
            q, k, v, is_causal=is_causal, causal_align=causal_align, scale=scale, enable_gqa=enable_gqa,
            kv_lens=kv_lens, return_lse=return_lse, layout=layout, out=out)
    return (out, lse) if return_lse else out


def bind() -> None:
    """Defines the operators and shows PyTorch to the compiled half."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise ImportError(f"acromion needs PyTorch 2.10 or newer, this is {torch.__version__}")
    _define("sdpa", "", "(Tensor, Tensor)", _compute, _fake)
    _define("sdpa_out", ", Tensor(a!) out", "Tensor", _compute_out, _fake_out)
    torch.compiler.substitute_in_graph(_native.sdpa)(_sdpa)
    _native.bind_torch(torch.Tensor, torch.nn.Parameter, _sdpa, torch.is_grad_enabled, torch._C._len_torch_dispatch_stack,
                       torch.cuda.is_current_stream_capturing, torch.empty_like, torch.float32, torch.uint8)
