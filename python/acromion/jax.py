"""acromion.sdpa for JAX: under jit, vmap and shard_map, on the CPU and on CUDA. See docs/manual/jax.md.

    import acromion.jax
    out = acromion.jax.sdpa(q, k, v, is_causal=True)

A call becomes one primitive. While it is traced, the compiled half checks shapes and types and makes the problem, by
the rules of acromion.sdpa; XLA then calls it by its typed FFI (python/src/xla.c). Gradients are a second primitive,
which the same function of the FFI computes. Loads JAX, and never PyTorch."""
import functools
from typing import Any, Dict, FrozenSet, List, Literal, Optional, Sequence, Tuple, Union, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _gradients, _native
from ._errors import UnsupportedError

__all__ = ["explain", "sdpa"]

Scale = Optional[Union[float, jax.Array]]
Window = Optional[Union[int, Tuple[Optional[int], Optional[int]]]]

_TARGET = "acromion_sdpa"
_DEVICE_TYPES = {"cpu": 1, "cuda": 2, "gpu": 2}  # JAX's platforms and DLPack's numbers
_OF_BATCH = ("kv_lens", "kv_starts", "ranges", "tree")  # their first dimension is the batch's
_OF_HEADS = ("sinks", "alibi_slopes")
_SCALES = ("q_scale", "k_scale", "v_scale")
_MAIN = ("q", "k", "v")
_OUTPUTS = ("o", "lse", "d_o")  # what gradients read besides
_TENSORS = (*_MAIN, "attn_mask", *_SCALES, *_OF_BATCH, *_OF_HEADS, "q_offsets", "kv_offsets")  # the operands' order

Options = Tuple[Tuple[str, Any], ...]


# ---- The problem ----

def _packed_strides(shape: Sequence[int]) -> List[int]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return strides[::-1]


def _batch_of(shapes: Dict[str, Tuple[int, ...]]) -> int:
    return max(shapes[name][0] for name in _MAIN)


def _described(name: str, aval: Any, batch: int, shares: Tuple[str, ...]) -> Tuple[Any, ...]:
    """A tensor as _native.problem takes it. One that all batch entries share is repeated by a stride of 0."""
    if name not in shares:
        return tuple(aval.shape), None, aval.dtype.name
    return (batch, *aval.shape[1:]), (0, *_packed_strides(aval.shape)[1:]), aval.dtype.name


def _problem(avals: Sequence[Any], names: Tuple[str, ...], options: Options,
             shares: Tuple[str, ...]) -> Optional[bytes]:
    """Checks everything, and returns the bytes of the acr_problem; None where q has no rows."""
    given = dict(zip(names, avals))
    shapes = {name: aval.shape for name, aval in given.items()}
    batch = _batch_of(shapes) if shares else 0
    tensors = {name: _described(name, aval, batch, shares) for name, aval in given.items()}
    arguments = dict(options)
    out_dtype = arguments.pop("out_dtype")
    if out_dtype is not None:
        lead = tensors["q"][0][:-1]
        arguments["out"] = ((*lead, *tensors["v"][0][-1:]), None, out_dtype)
    return _native.problem(**tensors, **arguments)


def _results(avals: Sequence[Any], names: Tuple[str, ...], options: Options,
             shares: Tuple[str, ...]) -> List[Tuple[Tuple[int, ...], Any]]:
    """Shape and type of the output, and of the log-sum-exp where it is asked for."""
    given, arguments = dict(zip(names, avals)), dict(options)
    q, v = given["q"], given["v"]
    lead = q.shape[:-1]
    if shares:
        lead = (_batch_of({name: given[name].shape for name in _MAIN}), *lead[1:])
    dtype = arguments["out_dtype"]
    if dtype is None:
        dtype = jnp.float16 if q.dtype == jnp.float8_e4m3fn else q.dtype
    found = [((*lead, v.shape[-1]), jnp.dtype(dtype))]
    if arguments["return_lse"]:
        is_bshd = arguments["layout"] == "bshd"
        found.append(((*lead[:-2], lead[-1], lead[-2]) if is_bshd else lead, jnp.dtype(jnp.float32)))
    return found


# ---- The primitive ----

_primitive = Primitive(_TARGET)
_primitive.multiple_results = True
_gradient = Primitive(_TARGET + "_gradient")
_gradient.multiple_results = True


def _varying(aval: Any) -> FrozenSet[str]:
    """The mesh's axes along which an array differs, under shard_map."""
    return aval.mat.varying if hasattr(aval, "mat") else getattr(aval, "vma", frozenset())


def _vary_alike(values: Sequence[Any]) -> List[Any]:
    """Says of every array that it differs where any does: so each device's gradient of one that all have is summed."""
    varying = [_varying(jax.typeof(x)) if hasattr(jax, "typeof") else frozenset() for x in values]
    every = frozenset().union(*varying)
    found = []
    for x, own in zip(values, varying):
        axes = tuple(sorted(every - own))
        if axes:
            x = jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)
        found.append(x)
    return found


def _arrays(avals: Sequence[Any], results: Sequence[Tuple[Tuple[int, ...], Any]]) -> List[Any]:
    """Results that vary under shard_map wherever an input does."""
    varying = frozenset().union(*map(_varying, avals))
    found = []
    for shape, dtype in results:
        more: Dict[str, Any] = {}
        if varying and hasattr(avals[0], "mat"):  # from JAX 0.10 on it goes with the mesh; before, the set itself
            spec = jax.sharding.PartitionSpec(*[None] * len(shape))
            more = {"sharding": jax.sharding.NamedSharding(avals[0].sharding.mesh, spec),
                    "manual_axis_type": type(avals[0].mat)(varying=varying)}
        elif varying:
            more = {"vma": varying}
        found.append(jax.core.ShapedArray(shape, dtype, **more))
    return found


def _abstract(*avals: Any, names: Tuple[str, ...], options: Options, shares: Tuple[str, ...]) -> List[Any]:
    _problem(avals, names, options, shares)
    return _arrays(avals, _results(avals, names, options, shares))


def _lower(platform: str, ctx: Any, *operands: Any, names: Tuple[str, ...], options: Options,
           shares: Tuple[str, ...]) -> Any:
    problem = _problem(ctx.avals_in, names, options, shares)
    assert problem is not None  # _call does not come here without rows
    return _lower_problem(platform, ctx, operands, names, problem)


def _lower_problem(platform: str, ctx: Any, operands: Sequence[Any], names: Tuple[str, ...], problem: bytes) -> Any:
    if platform == "cpu":  # of GPUs there may be none here yet, or several
        _native.plan_text(problem, _DEVICE_TYPES["cpu"], 0)
    lower = jax.ffi.ffi_lowering(_TARGET)
    return lower(ctx, *operands, operands=" ".join(names), problem=np.frombuffer(problem, np.int64))


@functools.partial(jax.jit, static_argnames=("names", "options", "shares"))
def _compiled(*operands: jax.Array, **params: Any) -> List[jax.Array]:
    return _primitive.bind(*operands, **params)


# ---- Gradients ----

def _own_operands(operands: Sequence[Any], names: Tuple[str, ...]) -> Tuple[Sequence[Any], Tuple[str, ...]]:
    """Those of the forward pass."""
    count = len(names) - len(_OUTPUTS)
    return operands[:count], names[:count]


def _abstract_gradient(*avals: Any, names: Tuple[str, ...], options: Options) -> List[Any]:
    given = dict(zip(names, avals))
    wanted = _gradients.WITH_GRADIENT if "sinks" in given else _MAIN
    return _arrays(avals, [(given[name].shape, given[name].dtype) for name in wanted])


def _lower_gradient(platform: str, ctx: Any, *operands: Any, names: Tuple[str, ...], options: Options) -> Any:
    problem = _problem(*_own_operands(ctx.avals_in, names), options, ())
    assert problem is not None  # there was an output
    return _lower_problem(platform, ctx, operands, names, _native.gradient_problem(problem))


def _refuse_second(primals: Any, tangents: Any, **params: Any) -> Any:
    raise NotImplementedError(f"{_gradients.FIRST_ALONE}: take jax.nn.dot_product_attention there")


@functools.partial(jax.jit, static_argnames=("names", "options"))
def _compiled_gradient(*operands: jax.Array, **params: Any) -> List[jax.Array]:
    return _gradient.bind(*operands, **params)


_STOP = "say jax.lax.stop_gradient where none is wanted"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(names: Tuple[str, ...], options: Options, *operands: Any) -> Tuple[Any, ...]:
    return tuple(_primitive.bind(*operands, names=names, options=options, shares=()))


def _with_lse(options: Options) -> Options:
    return tuple(sorted({**dict(options), "return_lse": True}.items()))


def _attend_forward(names: Tuple[str, ...], options: Options, *operands: Any) -> Tuple[Tuple[Any, ...], Any]:
    given = dict(zip(names, operands))
    for name, x in given.items():
        if x.perturbed and name not in _gradients.WITH_GRADIENT:
            raise NotImplementedError(f"{_gradients.not_of(name)}: {_STOP}")
    values = tuple(x.value for x in operands)
    is_8_bit = any(given[name].value.dtype == jnp.float8_e4m3fn for name in _MAIN)
    reason = _gradients.not_with({**given, **dict(options)}, is_8_bit)
    if reason:
        raise NotImplementedError(f"an input requires a gradient, and {reason}: {_STOP}")
    out, lse = _primitive.bind(*values, names=names, options=_with_lse(options), shares=())
    return (out, lse) if dict(options)["return_lse"] else (out,), (values, out, lse)


def _only_rows_of_sequences(gradient: Any, offsets: Any) -> Any:
    """Rows of no sequence, which nothing computes, have a gradient of 0."""
    row = jnp.arange(gradient.shape[0])
    belongs = (row >= offsets[0]) & (row < offsets[-1])
    return jnp.where(belongs[:, None, None], gradient, jnp.zeros_like(gradient))


def _attend_backward(names: Tuple[str, ...], options: Options, residual: Any, cotangents: Any) -> Tuple[Any, ...]:
    operands, out, lse = residual
    if len(cotangents) > 1 and not isinstance(cotangents[1], SymbolicZero):
        raise NotImplementedError(f"{_gradients.OUTPUT_ALONE}: {_STOP}")
    if isinstance(cotangents[0], SymbolicZero):
        return (None,) * len(operands)
    gradients = _gradient.bind(*operands, out, lse, cotangents[0], names=(*names, *_OUTPUTS),
                               options=_with_lse(options))
    given = dict(zip(names, operands))
    found = dict(zip(_gradients.WITH_GRADIENT, gradients))
    if "q_offsets" in given:
        keys = given.get("kv_offsets", given["q_offsets"])
        for name, offsets in (("q", given["q_offsets"]), ("k", keys), ("v", keys)):
            found[name] = _only_rows_of_sequences(found[name], offsets)
    return tuple(found.get(name) for name in names)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


# ---- vmap ----

def _fold(x: Any, mapped: Optional[int], size: int, axis: int) -> Any:
    """The mapped dimension, or as many copies, becomes the outer part of dimension `axis`."""
    if mapped is None:
        x = jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], size, *x.shape[axis:]))
    else:
        x = jnp.moveaxis(x, mapped, axis)
    return x.reshape(*x.shape[:axis], size * x.shape[axis + 1], *x.shape[axis + 2:])


def _widen(x: Any, mapped: Optional[int], axis: int, extent: int) -> Any:
    """Dimension `axis`, counted without the mapped one, in `extent` copies where it is 1."""
    at = axis if mapped is None or mapped > axis else axis + 1
    if x.shape[at] == extent:
        return x
    return jnp.broadcast_to(x, (*x.shape[:at], extent, *x.shape[at + 1:]))


def _extent(x: Any, mapped: Optional[int], axis: int) -> int:
    return x.shape[axis if mapped is None or mapped > axis else axis + 1]


def _into_batch(name: str, x: Any, mapped: Optional[int], size: int, batch: int) -> Any:
    """An operand of the folded problem. What is the same for all entries stays one entry where that can be said."""
    can_share = name in (*_MAIN, "attn_mask")
    if name in _OF_HEADS or (can_share and mapped is None and x.shape[0] == 1):
        return x
    return _fold(_widen(x, mapped, 0, batch), mapped, size, 0)


def _into_heads(name: str, x: Any, mapped: Optional[int], size: int, heads: int, layout: str) -> Any:
    if name in _OF_BATCH:
        return x
    if name == "attn_mask":
        if mapped is None and x.shape[1] == 1:
            return x
        x = _widen(x, mapped, 1, heads)
    axis = 0 if name in _OF_HEADS else 2 if name in _MAIN and layout == "bshd" else 1
    return _fold(x, mapped, size, axis)


def _mapping(operands: Sequence[Any], dims: Sequence[Optional[int]], names: Tuple[str, ...],
             options: Options) -> Tuple[Dict[str, Optional[int]], Dict[str, Any], int, str]:
    """What vmap maps, by name: the mapped dimensions, the operands, how many there are, and the layout."""
    given = dict(zip(names, operands))
    if "q_offsets" in given:
        raise UnsupportedError("vmap over packed sequences: pack them all into one call, or use jax.lax.map", -2)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    return dict(zip(names, dims)), given, size, dict(options)["layout"]


def _batched(operands: Sequence[Any], dims: Sequence[Optional[int]], *, names: Tuple[str, ...], options: Options,
             shares: Tuple[str, ...]) -> Tuple[List[Any], List[int]]:
    """The mapped dimension joins the batch, or, where it maps what each head has its own of, the heads."""
    mapped, given, size, layout = _mapping(operands, dims, names, options)
    of_heads = [name for name in _OF_HEADS if mapped.get(name) is not None]
    of_batch = [name for name in _OF_BATCH if mapped.get(name) is not None]
    if of_heads and of_batch:
        raise UnsupportedError(f"vmap over {of_heads[0]}, which each head has its own of, and over {of_batch[0]}, "
                               f"which each batch entry has, is no single problem: use jax.lax.map", -2)
    if of_heads:
        axis = 2 if layout == "bshd" else 1
        heads = _extent(given["q"], mapped["q"], axis)
        folded = {name: _into_heads(name, x, mapped[name], size, heads, layout) for name, x in given.items()}
    else:
        batch = max(_extent(given[name], mapped[name], 0) for name in _MAIN)
        folded = {name: _into_batch(name, x, mapped[name], size, batch) for name, x in given.items()}
        batch *= size
        if all(folded[name].shape[0] == 1 for name in _MAIN):  # only what may be shared is mapped
            folded["q"] = _widen(folded["q"], None, 0, batch)
        shares = tuple(name for name in _MAIN if folded[name].shape[0] < batch)
    results = _primitive.bind(*folded.values(), names=names, options=options, shares=shares)
    # The log-sum-exp is [batch, heads, length] in every layout.
    axes = [(2 if layout == "bshd" else 1) if of_heads else 0, 1 if of_heads else 0]
    return [x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1:])
            for x, axis in zip(results, axes)], axes[:len(results)]


def _batched_gradient(operands: Sequence[Any], dims: Sequence[Optional[int]], *, names: Tuple[str, ...],
                      options: Options) -> Tuple[List[Any], List[int]]:
    """As _batched has it, but nothing is shared: each copy has a gradient of its own. Sinks have one for each head."""
    mapped, given, size, layout = _mapping(operands, dims, names, options)
    of_heads = "sinks" in given or any(mapped.get(name) is not None for name in _OF_HEADS)
    of_batch = [name for name in _OF_BATCH if mapped.get(name) is not None]
    if of_heads and of_batch:
        raise UnsupportedError(f"vmap over {of_batch[0]}, which each batch entry has, of gradients with sinks or "
                               f"slopes, which each head has, is no single problem: use jax.lax.map", -2)
    heads_axis = 2 if layout == "bshd" else 1
    if of_heads:
        heads = _extent(given["q"], mapped["q"], heads_axis)
        folded = {name: _fold(x, mapped[name], size, 1) if name == "lse" else
                  _fold(x, mapped[name], size, heads_axis) if name in _OUTPUTS else
                  _into_heads(name, x, mapped[name], size, heads, layout) for name, x in given.items()}
    else:
        batch = max(_extent(given[name], mapped[name], 0) for name in _MAIN)
        folded = {name: x if name in _OF_HEADS else _fold(_widen(x, mapped[name], 0, batch), mapped[name], size, 0)
                  for name, x in given.items()}
    results = _gradient.bind(*folded.values(), names=names, options=options)
    axes = [heads_axis if of_heads else 0] * len(_MAIN) + [0]
    return [x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1:])
            for x, axis in zip(results, axes)], axes[:len(results)]


# ---- Registering ----

def _register() -> None:
    cpu, cuda = _native.xla_handlers()
    jax.ffi.register_ffi_target(_TARGET, cpu, platform="cpu")
    jax.ffi.register_ffi_target(_TARGET, cuda, platform="CUDA")
    for primitive, abstract, compiled, lower, batched in (
            (_primitive, _abstract, _compiled, _lower, _batched),
            (_gradient, _abstract_gradient, _compiled_gradient, _lower_gradient, _batched_gradient)):
        primitive.def_abstract_eval(abstract)
        primitive.def_impl(compiled)
        for platform in ("cpu", "cuda"):
            mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
        batching.primitive_batchers[primitive] = batched
        ad.primitive_jvps[primitive] = _refuse_second


_register()


# ---- Arguments ----

def _static(name: str, value: Any) -> Any:
    """An argument that is no tensor: part of the problem, so known when the function is traced."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} is traced: it is part of the problem and must be known when the function is traced, "
                        f"as with static_argnames of jax.jit")
    if isinstance(value, (list, tuple)):
        return tuple(_static(name, item) for item in value)
    return value.item() if isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.ndim == 0 else value


def _scale_tensor(scale: Any, k: Any, layout: str) -> Any:
    """A traced scale of fp8 that is one number, for each batch entry and head."""
    scale = jnp.asarray(scale)
    if scale.ndim != 0 or k.ndim != 4:
        return scale
    return jnp.broadcast_to(scale, (k.shape[0], k.shape[2 if layout == "bshd" else 1]))


def _mask_tensor(mask: Any, keys: int) -> Any:
    """With the four dimensions of the scores, and a value for each key."""
    mask = jnp.asarray(mask)
    if mask.ndim < 4:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return jnp.broadcast_to(mask, (*mask.shape[:-1], keys)) if mask.shape[-1] == 1 else mask


def _split(arguments: Dict[str, Any]) -> Tuple[Dict[str, Any], Options]:
    """Tensors in the operands' order, and everything else."""
    tensors = {name: arguments.pop(name) for name in _TENSORS}
    is_packed = tensors["q_offsets"] is not None or tensors["kv_offsets"] is not None
    layout = arguments["layout"] = arguments["layout"] or ("bshd" if is_packed else "bhsd")
    for name in _MAIN:
        tensors[name] = jnp.asarray(tensors[name])
    k = tensors["k"]
    for name in _SCALES:
        if isinstance(tensors[name], (int, float)):
            arguments[name] = tensors.pop(name)
        elif tensors[name] is not None:
            tensors[name] = _scale_tensor(tensors[name], k, layout)
    if tensors["attn_mask"] is not None:
        axis = 0 if is_packed else 1 if layout == "bshd" else 2
        keys = arguments["max_kv_len"] or (k.shape[axis] if k.ndim > axis else 1)
        tensors["attn_mask"] = _mask_tensor(tensors["attn_mask"], keys)
    options = {name: _static(name, value) for name, value in arguments.items()}
    if options["out_dtype"] is not None:
        options["out_dtype"] = jnp.dtype(options["out_dtype"]).name
    return ({name: jnp.asarray(tensors[name]) for name in _TENSORS if tensors.get(name) is not None},
            tuple(sorted(options.items())))


def _call(arguments: Dict[str, Any]) -> Any:
    tensors, options = _split(arguments)
    names, avals = tuple(tensors), tuple(tensors.values())
    if _problem(avals, names, options, ()) is None:  # no rows
        results = [jnp.zeros(shape, dtype) for shape, dtype in _results(avals, names, options, ())]
    else:
        results = _attend(names, options, *_vary_alike(avals))
    return tuple(results) if dict(options)["return_lse"] else results[0]


@overload
def sdpa(q: Any, k: Any, v: Any, attn_mask: Optional[Any] = None, dropout_p: float = 0.0, is_causal: bool = False, *,
         causal_align: Optional[Literal["top_left", "bottom_right"]] = None, scale: Optional[float] = None,
         enable_gqa: bool = False, kv_lens: Optional[Any] = None, return_lse: Literal[False] = False,
         layout: Optional[Literal["bhsd", "bshd"]] = None, out_dtype: Optional[Any] = None, q_scale: Scale = None,
         k_scale: Scale = None, v_scale: Scale = None, window: Window = None, softcap: Optional[float] = None,
         sinks: Optional[Any] = None, kv_starts: Optional[Any] = None, alibi_slopes: Optional[Any] = None,
         chunk: Optional[int] = None, ranges: Optional[Any] = None, tree: Optional[Any] = None,
         q_offsets: Optional[Any] = None, kv_offsets: Optional[Any] = None, max_q_len: Optional[int] = None,
         max_kv_len: Optional[int] = None) -> jax.Array: ...


@overload
def sdpa(q: Any, k: Any, v: Any, attn_mask: Optional[Any] = None, dropout_p: float = 0.0, is_causal: bool = False, *,
         causal_align: Optional[Literal["top_left", "bottom_right"]] = None, scale: Optional[float] = None,
         enable_gqa: bool = False, kv_lens: Optional[Any] = None, return_lse: Literal[True],
         layout: Optional[Literal["bhsd", "bshd"]] = None, out_dtype: Optional[Any] = None, q_scale: Scale = None,
         k_scale: Scale = None, v_scale: Scale = None, window: Window = None, softcap: Optional[float] = None,
         sinks: Optional[Any] = None, kv_starts: Optional[Any] = None, alibi_slopes: Optional[Any] = None,
         chunk: Optional[int] = None, ranges: Optional[Any] = None, tree: Optional[Any] = None,
         q_offsets: Optional[Any] = None, kv_offsets: Optional[Any] = None, max_q_len: Optional[int] = None,
         max_kv_len: Optional[int] = None) -> Tuple[jax.Array, jax.Array]: ...


def sdpa(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
         causal_align: Any = None, scale: Any = None, enable_gqa: bool = False, kv_lens: Any = None,
         return_lse: bool = False, layout: Any = None, out_dtype: Any = None, q_scale: Any = None,
         k_scale: Any = None, v_scale: Any = None, window: Any = None, softcap: Any = None, sinks: Any = None,
         kv_starts: Any = None, alibi_slopes: Any = None, chunk: Any = None, ranges: Any = None, tree: Any = None,
         q_offsets: Any = None, kv_offsets: Any = None, max_q_len: Any = None, max_kv_len: Any = None) -> Any:
    """Scaled dot-product attention: softmax(scale * q @ k.T + mask) @ v, per batch entry and head.

    The arguments are those of acromion.sdpa (layout None is "bhsd", of packed arrays "bshd"), with arrays of JAX, or
    what jax.numpy.asarray takes, for tensors, and out_dtype in place of out: with float8_e4m3fn inputs float16 or
    bfloat16. Arguments that are no tensors must be known when the function is traced; a scale of fp8 may also be a
    traced number.

    Returns the output, or (output, log-sum-exp). Rows of packed arrays that belong to no sequence hold anything.
    Raises what acromion.sdpa raises, when the function is traced; that no kernel runs a problem, on the CPU when it is
    compiled, on CUDA when it runs.

    Reverse-mode gradients are those of the output, with respect to q, k, v and sinks, and the same bits in every run.
    What is asked for and not computed (gradients of masks, slopes and scales, through the log-sum-exp, of float8, with
    ranges or a tree, of gradients) raises NotImplementedError when the function is traced."""
    return _call(locals().copy())


def explain(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
            device: "Optional[jax.Device]" = None, **arguments: Any) -> str:
    """Which kernel sdpa would run for these arguments on a device (JAX's first if None), and why: one line of text.
    Runs nothing."""
    device = device or jax.devices()[0]
    if device.platform not in _DEVICE_TYPES:
        raise UnsupportedError(f"acromion runs on cpu and cuda, not on {device.platform}", -2)
    every = dict(sdpa.__kwdefaults__, q=q, k=k, v=v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal)
    unknown = sorted(set(arguments) - set(every))
    if unknown:
        raise TypeError(f"explain() got an unexpected keyword argument {unknown[0]!r}")
    tensors, options = _split({**every, **arguments})
    problem = _problem(tuple(tensors.values()), tuple(tensors), options, ())
    if problem is None:
        return "nothing to compute: q has no rows"
    return _native.plan_text(problem, _DEVICE_TYPES[device.platform], getattr(device, "local_hardware_id", 0) or 0)
