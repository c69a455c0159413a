"""The operators torch.ops.acromion.sdpa, .sdpa_lse, .sdpa_out, .sdpa_lse_out and .sdpa_backward: what acromion.sdpa
becomes under torch.compile, and the way through PyTorch's dispatcher for tensor subclasses and modes; and gradients,
which go past it where nobody watches. Plain eager calls without gradients never come here."""
import functools
from typing import Any, Dict, Optional, Tuple, Union

import torch

from . import _gradients, _native
from ._errors import from_status

Result = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]

ARGUMENTS = ("Tensor q, Tensor k, Tensor v, *, bool is_causal=False, str? causal_align=None, float? scale=None, "
             "bool enable_gqa=False, Tensor? kv_lens=None, str layout='bhsd', float? q_scale=None, "
             "float? k_scale=None, float? v_scale=None, Tensor? q_scales=None, Tensor? k_scales=None, "
             "Tensor? v_scales=None, int[]? window=None, Tensor? q_offsets=None, Tensor? kv_offsets=None, "
             "SymInt? max_q_len=None, SymInt? max_kv_len=None, Tensor? attn_mask=None, float? softcap=None, "
             "SymInt? chunk=None, Tensor? kv_starts=None, Tensor? sinks=None, Tensor? alibi_slopes=None, "
             "Tensor? ranges=None, Tensor? tree=None, Tensor? page_table=None, SymInt? v_dim=None, "
             "bool invariant=False")
POSITIONAL = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal")
PAGED_POSITIONAL = ("q", "k", "v", "page_table", "kv_lens")
ALIASES = {"query": "q", "key": "k", "value": "v", "k_cache": "k", "v_cache": "v", "cu_seqlens_q": "q_offsets",
           "cu_seqlens_k": "kv_offsets", "max_seqlen_q": "max_q_len", "max_seqlen_k": "max_kv_len"}
SCALES = ("q_scale", "k_scale", "v_scale")  # a number or a tensor
SIDES = ("attn_mask", "kv_lens", "q_offsets", "kv_offsets", "kv_starts", "sinks", "alibi_slopes", "ranges",
         "tree", "page_table")  # tensors
PLAIN = (torch.Tensor, torch.nn.Parameter)
library = torch.library.Library("acromion", "DEF")


# ---- What the operators compute ----

def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    for name in SCALES:  # an operator's argument is either a number or a tensor
        tensor = arguments.pop(name + "s", None)
        if tensor is not None:
            arguments[name] = tensor
    return _native.run(q, k, v, **arguments)


def _run_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    return _run(q, k, v, return_lse=True, **arguments)


def _run_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> None:
    _run(q, k, v, **arguments)


def _run_lse_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    return _run(q, k, v, return_lse=True, **arguments)[1]


def _spread(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """A mask over all keys, these side by side in memory."""
    return mask.expand(*mask.shape[:-1], keys).contiguous()


def _run_backward(d_o: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
                  v: torch.Tensor, **arguments: Any) -> Tuple[torch.Tensor, ...]:
    grads = _fake_backward(d_o, o, lse, q, k, v, **arguments)
    _fill_gradients(grads, d_o, o, lse, q, k, v, **arguments)
    return grads


def _run_backward_eager(d_o: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
                        v: torch.Tensor, *, sinks: Optional[torch.Tensor],
                        **arguments: Any) -> Tuple[Optional[torch.Tensor], ...]:
    """_run_backward past the dispatcher, where None stands for the gradients of sinks that there are not: an operator
    has to give a tensor."""
    grads = (_like_packed(q), _like_packed(k), _like_packed(v), None if sinks is None else torch.empty_like(sinks))
    _fill_gradients(grads, d_o, o, lse, q, k, v, sinks=sinks, **arguments)
    return grads


def _fill_gradients(grads: Tuple[Optional[torch.Tensor], ...], d_o: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
                    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> None:
    sinks = arguments.get("sinks")
    # Rows that repeat, as of sum().backward(), have no tensor map on CUDA.
    if d_o.stride(-1) != 1 or not any(d_o.stride()) or (d_o.is_cuda and 0 in d_o.stride()):
        d_o = d_o.contiguous()
    if q.numel() == 0:
        for grad in grads:
            if grad is not None:
                grad.zero_()
        return
    if arguments.get("q_offsets") is not None:  # rows of no sequence have no gradient
        for grad in grads[:3]:
            grad.zero_()
    _native.gradients(d_o, o, lse, *grads[:3], None if sinks is None else grads[3], q, k, v, **arguments)


# ---- What comes out, without computing ----

def _check_devices(q: torch.Tensor, **others: Any) -> None:
    """One device for all tensors. Without this, PyTorch would take a call with one meta tensor for shape inference and
    return memory that nobody wrote."""
    for name, other in others.items():
        if isinstance(other, torch.Tensor) and other.device != q.device:
            raise from_status(-1, f"{name} is on {other.device} and q on {q.device}, must be the same")


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, v_dim: Any = None, **arguments: Any) -> torch.Tensor:
    # The same memory layout as sdpa.c gives: like q where the shape is q's, else packed.
    _check_devices(q, k=k, v=v, **arguments)
    dtype = torch.float16 if q.dtype == torch.float8_e4m3fn else q.dtype
    dim = v.shape[-1] if v_dim is None else v_dim
    same = dim == q.shape[-1]
    return torch.empty_like(q, dtype=dtype) if same else q.new_empty((*q.shape[:-1], dim), dtype=dtype)


def _fake_lse_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str = "bhsd", q_offsets: Any = None,
                  **arguments: Any) -> torch.Tensor:
    _check_devices(q, k=k, v=v, q_offsets=q_offsets, **arguments)
    if q_offsets is not None:
        return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    heads, rows = (2, 1) if layout == "bshd" else (1, 2)
    return q.new_empty((q.shape[0], q.shape[heads], q.shape[rows]), dtype=torch.float32)


def _fake_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              **arguments: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    return _fake(q, k, v, v_dim=arguments.get("v_dim")), _fake_lse_out(q, k, v, **arguments)


def _fake_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> None:
    _check_devices(q, k=k, v=v, **arguments)


def _like_packed(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(d_o: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
                   v: torch.Tensor, *, sinks: Optional[torch.Tensor] = None,
                   **arguments: Any) -> Tuple[torch.Tensor, ...]:
    dsinks = q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)
    return (*(_like_packed(x) for x in (q, k, v)), dsinks)


# name -> (arguments beside ARGUMENTS, result, computing, faking)
OPERATORS = {
    "sdpa": ("", "Tensor", _run, _fake),
    "sdpa_lse": ("", "(Tensor, Tensor)", _run_lse, _fake_lse),
    "sdpa_out": (", Tensor(a!) out", "()", _run_out, _fake_out),
    "sdpa_lse_out": (", Tensor(a!) out", "Tensor", _run_lse_out, _fake_lse_out),
}


# ---- Defining them ----

WITHOUT = "call under torch.no_grad() or torch.inference_mode(), or give tensors from .detach()"


def _refuse_gradients(operator: str, q: torch.Tensor, k: torch.Tensor, **arguments: Any) -> None:
    """Gradients that acromion does not compute, by the name of what wants or prevents them."""
    for name, tensor in (("k", k), *arguments.items()):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and name not in _gradients.WITH_GRADIENT:
            raise NotImplementedError(f"{_gradients.not_of(name)}: {WITHOUT}")
    if operator.endswith("out"):
        reason: Optional[str] = "with out= nothing is recorded"
    else:
        reason = _gradients.not_with(arguments, torch.float8_e4m3fn in (q.dtype, k.dtype))
    if reason:
        raise NotImplementedError(f"an input requires a gradient, and {reason}: {WITHOUT}")


def _is_eager(*tensors: Any) -> bool:
    """Whether nobody watches operators, so that a call need not pass PyTorch's dispatcher, which takes longer than the
    rest of it: no tracing, no modes, no transforms; tensors of PyTorch's own two classes, on devices that we serve,
    whose memory is what they say (the dispatcher negates views that are to be negated, and fills zeros without one)."""
    if (torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() != 0
            or torch._C._len_torch_function_stack() != 0
            or torch._C._functorch.peek_interpreter_stack() is not None):
        return False
    for x in tensors:
        if x is not None and (type(x) not in PLAIN or not (x.is_cuda or x.is_cpu) or x.is_neg()
                              or x._is_zerotensor()):
            return False
    return True


class _Attention(torch.autograd.Function):
    """sdpa_lse and its gradients. keyset: of the dispatcher; None: the call has not passed it (_is_eager)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Optional[torch.Tensor],
                keyset: Any, arguments: Dict[str, Any]) -> Tuple[torch.Tensor, torch.Tensor]:
        if keyset is None:
            out, lse = _run_lse(q, k, v, sinks=sinks, **arguments)
        else:
            operator = torch.ops.acromion.sdpa_lse.default
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = operator.redispatch(keyset & torch._C._after_autograd_keyset, q, k, v, sinks=sinks,
                                               **arguments)
        names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
        ctx.names = names
        ctx.arguments = {name: value for name, value in arguments.items() if name not in names}
        ctx.save_for_backward(q, k, v, out, lse, sinks, *[arguments[name] for name in names])
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_o: Optional[torch.Tensor], d_lse: Optional[torch.Tensor]) -> Tuple[Any, ...]:
        if d_lse is not None:
            raise NotImplementedError(f"{_gradients.OUTPUT_ALONE}: give lse.detach()")
        if d_o is None:
            return (None,) * 6
        saved = ctx.saved_tensors  # asked for once: checkpoints compute them again each time
        q, k, v, out, lse, sinks, *tensors = saved
        arguments = ctx.arguments
        if tensors:
            arguments = {**arguments, **dict(zip(ctx.names, tensors))}
        if not torch.is_grad_enabled() and _is_eager(d_o, *saved):
            return (*_run_backward_eager(d_o, out, lse, q, k, v, sinks=sinks, **arguments), None, None)
        dq, dk, dv, dsinks = torch.ops.acromion.sdpa_backward(d_o, out, lse, q, k, v, sinks=sinks, **arguments)
        return dq, dk, dv, None if sinks is None else dsinks, None, None


def _check_kinds(**tensors: Any) -> None:
    """What the dispatcher would refuse in its own words: other tensors than dense ones, and arrays beside tensors that
    only PyTorch can read."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, must be a "
                            "torch.Tensor beside tensors that only PyTorch can read (subclasses, the meta device, "
                            "sparse ones)")
        if tensor.is_nested:
            raise TypeError(f"{name} is a nested tensor, must be dense: pad it and give kv_lens")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} is a {tensor.layout} tensor, must be dense: {name}.to_dense()")
        if tensor.is_quantized:
            raise TypeError(f"{name} is a quantised tensor, must be plain: {name}.dequantize()")


def _define(name: str, extra_arguments: str, result: str, compute: Any, fake: Any) -> None:
    library.define(f"{name}({ARGUMENTS}{extra_arguments}) -> {result}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        library.impl(name, compute, key)
    torch.library.register_fake(f"acromion::{name}", fake, lib=library)
    operator = getattr(torch.ops.acromion, name).default

    def autograd(keyset: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        tensors = (q, k, v, *(x for x in arguments.values() if isinstance(x, torch.Tensor)))
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, q, k, v, **arguments)
        _refuse_gradients(name, q, k=k, v=v, **arguments)
        out, lse = _Attention.apply(q, k, v, arguments.pop("sinks", None), keyset, arguments)
        return (out, lse) if name == "sdpa_lse" else out

    library.impl(name, autograd, "Autograd", with_keyset=True)


def _define_backward() -> None:
    library.define(f"sdpa_backward(Tensor d_o, Tensor o, Tensor lse, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
                   tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        library.impl("sdpa_backward", _run_backward, key)
    torch.library.register_fake("acromion::sdpa_backward", _fake_backward, lib=library)
    operator = torch.ops.acromion.sdpa_backward.default

    def autograd(keyset: Any, *tensors: torch.Tensor, **arguments: Any) -> Any:
        inputs = (*tensors, *(x for x in arguments.values() if isinstance(x, torch.Tensor)))
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            raise NotImplementedError(f"{_gradients.FIRST_ALONE}: leave create_graph=True out")
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *tensors, **arguments)

    library.impl("sdpa_backward", autograd, "Autograd", with_keyset=True)


def _sdpa(*positional: Any, **keywords: Any) -> Result:
    """acromion.sdpa by the operators."""
    return _by_operators(POSITIONAL, positional, keywords)


def _sdpa_paged(*positional: Any, **keywords: Any) -> Result:
    """acromion.sdpa_paged by the operators."""
    return _by_operators(PAGED_POSITIONAL, positional, keywords)


def _by_operators(names: Tuple[str, ...], positional: Tuple[Any, ...], keywords: Dict[str, Any]) -> Result:
    arguments: Dict[str, Any] = dict(zip(names, positional))
    for name, value in keywords.items():
        arguments[ALIASES.get(name, name)] = value
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    if v is None and arguments.get("v_dim"):  # values inside keys; an operator needs a tensor
        v = k
    out, wants_lse = arguments.pop("out", None), arguments.pop("return_lse", False)
    if arguments.pop("dropout_p", 0):  # eager calls have been refused in C
        raise NotImplementedError("dropout_p must be 0: nothing is ever dropped")
    window = arguments.pop("window", None)
    if window is not None:
        sides = (window, None) if isinstance(window, int) else window
        arguments["window"] = [-1 if side is None else side for side in sides]
    tensors = {name: arguments[name] for name in SIDES if arguments.get(name) is not None}
    for name in SCALES:
        scale = arguments.pop(name, None)
        if isinstance(scale, (int, float)):
            arguments[name] = scale
        elif scale is not None:
            arguments[name + "s"] = tensors[name] = scale
    if not torch.compiler.is_compiling():
        _check_kinds(q=q, k=k, v=v, out=out, **tensors)
        _check_devices(q, k=k, v=v, out=out, **tensors)
        if out is not None and out.is_neg():
            raise ValueError("out is a view that PyTorch negates when it is read: give a tensor that is not")
    inputs = (q, k, v, *(x for x in arguments.values() if isinstance(x, torch.Tensor)))
    if out is None and torch.is_grad_enabled() and _is_eager(*inputs) and any(x.requires_grad for x in inputs):
        _refuse_gradients("sdpa", q, k=k, v=v, **arguments)
        found = _Attention.apply(q, k, v, arguments.pop("sinks", None), None, arguments)
        return found if wants_lse else found[0]
    operators = torch.ops.acromion
    if out is None:
        return (operators.sdpa_lse if wants_lse else operators.sdpa)(q, k, v, **arguments)
    if wants_lse:
        return out, operators.sdpa_lse_out(q, k, v, out=out, **arguments)
    operators.sdpa_out(q, k, v, out=out, **arguments)
    return out


@functools.lru_cache(maxsize=None)
def bind() -> None:
    """Defines the operators and shows PyTorch to the compiled half; once, however often it is called."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise ImportError(f"acromion needs PyTorch 2.10 or newer, this is {torch.__version__}")
    for name, definition in OPERATORS.items():
        _define(name, *definition)
    _define_backward()
    torch.compiler.substitute_in_graph(_native.sdpa, skip_signature_check=True)(_sdpa)
    torch.compiler.substitute_in_graph(_native.sdpa_paged, skip_signature_check=True)(_sdpa_paged)
    _native.bind_torch(torch.Tensor, torch.nn.Parameter, _sdpa, _sdpa_paged, torch.is_grad_enabled,
                       torch._C._len_torch_dispatch_stack, torch.cuda.is_current_stream_capturing, torch.empty_like,
                       _spread, torch.float16, torch.float32, torch.uint8, torch.int64, torch.uint64,
                       tuple((x, torch._neg_view(x)) for x in (torch.empty(1), torch.empty((2, 3), dtype=torch.float16),
                                                               torch.empty(1, requires_grad=True))))
