"""attn_implementation="acromion" for Hugging Face's transformers: an attention function, and a mask function that says
in key starts, key lengths, windows, chunks and alignment what transformers says in mask functions and padding; where
these cannot say it, in a boolean mask."""
import inspect
from typing import Any, Dict, List, Literal, NamedTuple, Optional, Tuple, Union

import torch
import transformers
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface, and_masks, bidirectional_mask_function, causal_mask_function, chunked_overlay, sdpa_mask,
    sliding_window_bidirectional_overlay, sliding_window_overlay)

from ._native import sdpa

NAME = "acromion"
HOLES = ("acromion: the attention mask has holes: while compiling or capturing, the ones of each row must lie side by "
         "side")
PADDED_CACHE = ("acromion: several new tokens over cached ones, in a batch that is padded on the right: not while "
                "compiling or capturing")
Window = Union[int, Tuple[int, int]]
Offset = Union[int, torch.Tensor]


class KeyMask(NamedTuple):
    """What a model's layers get as attention_mask."""
    causal_align: Optional[Literal["top_left", "bottom_right"]] = None  # None: not causal
    kv_lens: Optional[torch.Tensor] = None  # int32 [batch]
    kv_starts: Optional[torch.Tensor] = None  # int32 [batch]
    window: Optional[Window] = None
    chunk: Optional[int] = None
    attn_mask: Optional[torch.Tensor] = None  # boolean, and then alone


class Form(NamedTuple):
    """What a mask function of transformers asks for."""
    is_causal: bool
    window: Optional[Window] = None
    chunk: Optional[int] = None


# ---- Reading transformers' mask functions ----

AND = and_masks(causal_mask_function).__code__
SLIDING, SLIDING_BOTH = sliding_window_overlay(1).__code__, sliding_window_bidirectional_overlay(1).__code__
CHUNKED = chunked_overlay(1, torch.zeros(1, dtype=torch.int)).__code__


def _closure(function: Any) -> Dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))


def _parts(function: Any) -> List[Any]:
    """The functions whose intersection a mask function is."""
    if getattr(function, "__code__", None) is not AND:
        return [function]
    return [part for each in _closure(function)["mask_functions"] for part in _parts(each)]


def _form(function: Any) -> Optional[Form]:
    """None: only the function itself knows."""
    if function is causal_mask_function or function is bidirectional_mask_function:
        return Form(function is causal_mask_function)
    if torch.compiler.is_compiling():
        return None
    whole, window, chunk = [], None, None
    for part in _parts(function):
        code = getattr(part, "__code__", None)
        if part is causal_mask_function or part is bidirectional_mask_function:
            whole.append(part)
        elif code is SLIDING and window is None:
            window = _closure(part)["sliding_window"]
        elif code is SLIDING_BOTH and window is None:
            reach = _closure(part)["sliding_window"]
            window = (reach + 1, reach)
        elif code is CHUNKED and chunk is None:
            chunk = _closure(part)["chunk_size"]
        else:
            return None
    if len(whole) != 1:
        return None
    is_causal = whole[0] is causal_mask_function
    if window is not None and is_causal == isinstance(window, tuple):
        return None  # a window of one side without a causal mask, or of both with one
    return Form(is_causal, window, chunk) if is_causal or not chunk else None


# ---- The mask, once a forward pass ----

def _fit(padding: torch.Tensor, kv_offset: int, kv_length: int) -> torch.Tensor:
    """The padding mask over exactly the keys: those that it does not speak of do not exist."""
    padding = padding[:, kv_offset:kv_offset + kv_length].bool()
    return torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))


def _require(holds: torch.Tensor, message: str) -> None:
    """On the device, where reading the answer back is impossible: an assertion of the device."""
    torch._assert_async(holds, message)


def _must_not_wait(tensor: torch.Tensor) -> bool:
    return bool(torch.compiler.is_compiling() or tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _run_of_ones(padding: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the ones of each row begin and end, and whether in every row no zero lies between them."""
    places = torch.arange(padding.shape[1], device=padding.device, dtype=torch.int32)
    ends = ((places + 1) * padding).amax(-1)
    starts = torch.where(padding, places, padding.shape[1]).amin(-1)
    starts = torch.minimum(starts, ends).to(torch.int32)
    return starts, ends.to(torch.int32), (padding.sum(-1) == ends - starts).all()


def _causal(q_length: int, kv_length: int, q_offset: Offset, batch: int, device: Any) -> KeyMask:
    """Query i sees the keys up to i + q_offset, of which there may be more."""
    if isinstance(q_offset, int):
        if q_offset + q_length == kv_length:
            return KeyMask("bottom_right" if q_length > 1 else None)
        if q_offset == 0:
            return KeyMask("top_left")
    seen = q_offset + q_length
    lens = (torch.full((batch,), seen, dtype=torch.int32, device=device) if isinstance(seen, int)
            else seen.to(torch.int32).reshape(1).expand(batch).contiguous())
    return KeyMask("bottom_right" if q_length > 1 else None, lens)


def _padded(form: Form, padding: torch.Tensor, q_length: int, q_offset: Offset) -> Optional[KeyMask]:
    """The mask of a padded batch; None: no starts and lengths can say it. Reads one answer back from the device."""
    starts, ends, has_no_holes = _run_of_ones(padding)
    batch, kv_length = padding.shape
    reaches = (ends >= q_offset + q_length).all()  # every row has all keys that the queries may see
    is_full = starts_at_0 = ends_at_last = False
    if _must_not_wait(padding):
        _require(has_no_holes, HOLES)
        does_reach = True
        if form.is_causal and q_length > 1 and not (isinstance(q_offset, int) and q_offset == 0):
            _require(reaches, PADDED_CACHE)
    else:
        asked = (has_no_holes, padding.all(), (starts == 0).all(), (ends == kv_length).all(), reaches,
                 torch.as_tensor(q_offset, device=padding.device))
        holds, is_full, starts_at_0, ends_at_last, does_reach, q_offset = (
            torch.stack([answer.long() for answer in asked]).tolist())
        if not holds:
            return None
    if is_full:
        return _causal(q_length, kv_length, q_offset, batch, padding.device) if form.is_causal else KeyMask()
    kv_starts, kv_lens = None if starts_at_0 else starts, None if ends_at_last else ends
    if not form.is_causal:
        return KeyMask(None, kv_lens, kv_starts)
    if q_length == 1:
        seen = q_offset + 1
        return KeyMask(None, ends.clamp(max=seen) if isinstance(seen, int)
                       else torch.minimum(ends, seen).to(torch.int32), kv_starts)
    if isinstance(q_offset, int) and q_offset == 0:
        return KeyMask("top_left", kv_lens, kv_starts)
    if not does_reach:
        return None
    return _causal(q_length, kv_length, q_offset, batch, padding.device)._replace(kv_starts=kv_starts)


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: Offset = 0, kv_offset: Offset = 0,
         mask_function: Any = causal_mask_function, attention_mask: Optional[torch.Tensor] = None,
         local_size: Optional[int] = None, device: Any = "cpu", use_vmap: bool = False, **unused: Any) -> KeyMask:
    """transformers' mask interface, called once a forward pass. With a padding mask it reads one answer back from the
    device, as transformers' own mask for SDPA does; while compiling or capturing, the device asserts it instead."""
    form, found = _form(mask_function), None
    if form is not None and isinstance(kv_offset, int) and not (form.chunk and kv_offset):
        offset = q_offset - kv_offset  # among the keys that there are
        if attention_mask is not None:
            found = _padded(form, _fit(attention_mask, kv_offset, kv_length), q_length, offset)
        elif form.is_causal:
            found = _causal(q_length, kv_length, offset, batch_size, device)
        else:
            found = KeyMask()
        follows = q_length != kv_length or (found is not None and found.kv_lens is not None)
        if isinstance(form.window, tuple) and follows:
            found = None  # the middle of a window to both sides goes with the lengths, transformers' does not
    if form is not None and found is not None:
        return found._replace(window=form.window, chunk=form.chunk)
    return KeyMask(attn_mask=sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device))


# ---- Attention, once a layer ----

def _refuse(wanted: str) -> None:
    raise NotImplementedError(f"acromion: the model asks for {wanted}, which no kernel here computes")


def _plain_mask(module: Any, query: torch.Tensor, is_causal: Optional[bool], window: Optional[int]) -> KeyMask:
    """Without any mask the module decides, as transformers' SDPA does."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return KeyMask("top_left" if causal and query.shape[2] > 1 else None, window=window if causal else None)


def _with_bias(said: KeyMask, bias: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """attn_mask: the model's own bias, where there is one, and the mask."""
    mask = said.attn_mask
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: Optional[Any], dropout: float = 0.0, scaling: Optional[float] = None,
              is_causal: Optional[bool] = None, softcap: Optional[float] = None, s_aux: Optional[torch.Tensor] = None,
              position_bias: Optional[torch.Tensor] = None, sliding_window: Optional[int] = None,
              **kwargs: Any) -> Tuple[torch.Tensor, None]:
    """transformers' attention interface: [batch, heads, length, dim] in, [batch, length, heads, dim] out."""
    if dropout:
        _refuse(f"dropout {dropout}")
    for name in ("head_mask", "output_attentions"):
        if kwargs.get(name) not in (None, False):
            _refuse(name)
    if attention_mask is None:
        said = _plain_mask(module, query, is_causal, sliding_window)
    else:  # a tensor is the caller's own
        said = attention_mask if isinstance(attention_mask, KeyMask) else KeyMask(attn_mask=attention_mask)
    out = sdpa(query, key, value, attn_mask=_with_bias(said, position_bias), is_causal=said.causal_align is not None,
               causal_align=said.causal_align, scale=scaling, enable_gqa=True, kv_lens=said.kv_lens,
               kv_starts=said.kv_starts, window=said.window, chunk=said.chunk, softcap=softcap,
               sinks=None if s_aux is None else s_aux.float())
    return out.transpose(1, 2).contiguous(), None  # the output lies in memory as the query does: mostly no copy


def register() -> None:
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"acromion needs transformers whose masks are made from q_length (5.17 is tested), this is "
                          f"{transformers.__version__}")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
