"""attn_implementation="acromion" for Hugging Face's transformers: an attention function, and a mask function that says
in key lengths and alignment what transformers says in mask functions and padding, or refuses."""
import inspect
from typing import Any, Literal, NamedTuple, Optional, Tuple, Union

import torch
import transformers
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface, bidirectional_mask_function, causal_mask_function, sdpa_mask)

from ._native import sdpa

NAME = "acromion"
NOT_RIGHT_PADDED = ("acromion: the attention mask is no padding on the right: each row must be ones, then zeros. For a "
                    "tokenizer: padding_side='right'")
PADDED_CACHE = ("acromion: several new tokens over cached ones need a batch without padding: say the padded batch in "
                "one forward call, or token by token")


class KeyMask(NamedTuple):
    """What a model's layers get as attention_mask."""
    causal_align: Optional[Literal["top_left", "bottom_right"]]  # None: every query sees every key that kv_lens leaves
    kv_lens: Optional[torch.Tensor]  # int32 [batch]


Offset = Union[int, torch.Tensor]


def _is_causal(mask_function: Any, kv_length: int, local_size: Optional[int], allow_is_causal_skip: bool) -> bool:
    """Causal, not bidirectional; raises where the mask is neither."""
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return bool(mask_function is causal_mask_function)
    # transformers' own rule for its SDPA: a window that the keys do not fill changes nothing.
    if allow_is_causal_skip and local_size is not None and kv_length < local_size:
        return True
    raise NotImplementedError(
        "acromion: the model asks for a mask that is neither causal nor bidirectional: a sliding window or chunks "
        f"(size {local_size}, {kv_length} keys), packed sequences, or an overlay of its own")


def _fit(padding: torch.Tensor, kv_length: int) -> torch.Tensor:
    """The padding mask over exactly the keys: those that it does not speak of do not exist."""
    padding = padding[:, :kv_length].bool()
    return torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))


def _require(holds: torch.Tensor, message: str) -> None:
    """On the device, where reading the answer back is impossible: an assertion of the device."""
    torch._assert_async(holds, message)


def _must_not_wait(tensor: torch.Tensor) -> bool:
    return bool(torch.compiler.is_compiling() or tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _lengths(padding: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Ones in each row, and whether they all come first."""
    lens = padding.sum(-1, dtype=torch.int32)
    places = torch.arange(padding.shape[1], device=padding.device, dtype=torch.int32)
    return lens, (padding == (places < lens[:, None])).all()


def _padded_causal(lens: torch.Tensor, q_length: int, q_offset: Offset, waits: bool) -> KeyMask:
    """Query i sees the keys up to i + q_offset that exist."""
    if q_length == 1:
        return KeyMask(None, lens.clamp(max=q_offset + 1) if isinstance(q_offset, int)
                       else torch.minimum(lens, q_offset + 1).to(torch.int32))
    if isinstance(q_offset, int) and q_offset == 0:
        return KeyMask("top_left", lens)
    seen = q_offset + q_length
    enough = (lens >= seen).all()
    if not waits:
        _require(enough, PADDED_CACHE)
    elif not enough.item():
        raise NotImplementedError(PADDED_CACHE)
    return _causal(q_length, None, q_offset, lens.shape[0], lens.device)


def _causal(q_length: int, kv_length: Optional[int], q_offset: Offset, batch: int, device: Any) -> KeyMask:
    """Query i sees the keys up to i + q_offset; kv_length None: there may be more keys."""
    if isinstance(q_offset, int):
        if q_offset + q_length == kv_length:
            return KeyMask("bottom_right" if q_length > 1 else None, None)
        if q_offset == 0:
            return KeyMask("top_left", None)
    seen = q_offset + q_length
    lens = (torch.full((batch,), seen, dtype=torch.int32, device=device) if isinstance(seen, int)
            else seen.to(torch.int32).reshape(1).expand(batch).contiguous())
    return KeyMask("bottom_right" if q_length > 1 else None, lens)


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: Offset = 0, kv_offset: Offset = 0,
         mask_function: Any = causal_mask_function, attention_mask: Optional[torch.Tensor] = None,
         local_size: Optional[int] = None, allow_is_causal_skip: bool = True, device: Any = "cpu",
         **unused: Any) -> KeyMask:
    """transformers' mask interface, called once a forward pass. With a padding mask it reads one answer back from the
    device, as transformers' own mask for SDPA does; while compiling or capturing, the device asserts it instead."""
    causal = _is_causal(mask_function, kv_length, local_size, allow_is_causal_skip)
    if not isinstance(kv_offset, int) or kv_offset != 0:
        raise NotImplementedError(f"acromion: keys that begin at position {kv_offset} of a sliding cache, must be 0")
    if attention_mask is not None:
        padding = _fit(attention_mask, kv_length)
        lens, is_right_padded = _lengths(padding)
        waits = not _must_not_wait(padding)
        is_full = False
        if waits:
            answers = (is_right_padded, padding.all(), torch.as_tensor(q_offset, device=padding.device))
            holds, is_full, q_offset = torch.stack([answer.long() for answer in answers]).tolist()
            if not holds:
                raise NotImplementedError(NOT_RIGHT_PADDED)
        else:
            _require(is_right_padded, NOT_RIGHT_PADDED)
        if not is_full:
            return _padded_causal(lens, q_length, q_offset, waits) if causal else KeyMask(None, lens)
    return _causal(q_length, kv_length, q_offset, batch_size, device) if causal else KeyMask(None, None)


def _refuse(wanted: str) -> None:
    raise NotImplementedError(f"acromion: the model asks for {wanted}, which no kernel here computes")


def _plain_mask(module: Any, query: torch.Tensor, is_causal: Optional[bool]) -> KeyMask:
    """Without any mask the module decides, as transformers' SDPA does."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return KeyMask("top_left" if causal and query.shape[2] > 1 else None, None)


def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: Optional[Any], dropout: float = 0.0, scaling: Optional[float] = None,
              is_causal: Optional[bool] = None, **kwargs: Any) -> Tuple[torch.Tensor, None]:
    """transformers' attention interface: [batch, heads, length, dim] in, [batch, length, heads, dim] out."""
    if dropout:
        _refuse(f"dropout {dropout}")
    for name in ("position_bias", "softcap", "s_aux", "head_mask", "output_attentions"):
        if kwargs.get(name) not in (None, False):
            _refuse(name)
    if attention_mask is None:
        window = kwargs.get("sliding_window")
        if window is not None and key.shape[2] > window:
            _refuse(f"a sliding window of {window} over {key.shape[2]} keys")
        attention_mask = _plain_mask(module, query, is_causal)
    elif not isinstance(attention_mask, KeyMask):
        _refuse(f"a mask of its own, a {type(attention_mask).__name__}")
    said: KeyMask = attention_mask
    out = sdpa(query, key, value, is_causal=said.causal_align is not None, causal_align=said.causal_align,
               scale=scaling, enable_gqa=True, kv_lens=said.kv_lens)
    return out.transpose(1, 2).contiguous(), None  # the output lies in memory as the query does: mostly no copy


def register() -> None:
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"acromion needs transformers whose masks are made from q_length (5.17 is tested), this is "
                          f"{transformers.__version__}")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
