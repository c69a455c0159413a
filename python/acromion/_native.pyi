from typing import Any, Dict, Literal, Optional, Tuple, TypeVar, Union, overload

Array = TypeVar("Array")  # a torch.Tensor, a numpy.ndarray, or another array that speaks DLPack
Scale = Optional[Union[float, Any]]  # a number, or a float32 tensor [batch, heads of k]
Window = Optional[Union[int, Tuple[Optional[int], Optional[int]]]]  # keys up to a query's own, keys behind it

version: str

# q, k and v may also be given as query, key and value.
@overload
def sdpa(q: Array, k: Array, v: Optional[Array], attn_mask: Optional[Any] = None, dropout_p: float = 0.0, is_causal: bool = False,
         *, causal_align: Optional[Literal["top_left", "bottom_right"]] = None, scale: Optional[float] = None,
         enable_gqa: bool = False, kv_lens: Optional[Any] = None, return_lse: Literal[False] = False,
         layout: Literal["bhsd", "bshd"] = "bhsd", out: Optional[Array] = None, q_scale: Scale = None,
         k_scale: Scale = None, v_scale: Scale = None, window: Window = None, softcap: Optional[float] = None,
         sinks: Optional[Any] = None, kv_starts: Optional[Any] = None, alibi_slopes: Optional[Any] = None,
         chunk: Optional[int] = None, ranges: Optional[Any] = None, tree: Optional[Any] = None,
         q_offsets: Optional[Any] = None, kv_offsets: Optional[Any] = None, max_q_len: Optional[int] = None,
         max_kv_len: Optional[int] = None, cu_seqlens_q: Optional[Any] = None, cu_seqlens_k: Optional[Any] = None,
         max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
         page_table: Optional[Any] = None, v_dim: Optional[int] = None, invariant: bool = False) -> Array: ...
@overload
def sdpa(*, query: Array, key: Array, value: Array, attn_mask: Optional[Any] = None, dropout_p: float = 0.0,
         is_causal: bool = False, causal_align: Optional[Literal["top_left", "bottom_right"]] = None,
         scale: Optional[float] = None, enable_gqa: bool = False, kv_lens: Optional[Any] = None,
         return_lse: Literal[False] = False, layout: Literal["bhsd", "bshd"] = "bhsd", out: Optional[Array] = None,
         q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None, window: Window = None,
         softcap: Optional[float] = None, sinks: Optional[Any] = None, kv_starts: Optional[Any] = None,
         alibi_slopes: Optional[Any] = None, chunk: Optional[int] = None, ranges: Optional[Any] = None,
         tree: Optional[Any] = None, q_offsets: Optional[Any] = None, kv_offsets: Optional[Any] = None,
         max_q_len: Optional[int] = None, max_kv_len: Optional[int] = None, cu_seqlens_q: Optional[Any] = None,
         cu_seqlens_k: Optional[Any] = None, max_seqlen_q: Optional[int] = None,
         max_seqlen_k: Optional[int] = None,
         page_table: Optional[Any] = None, v_dim: Optional[int] = None, invariant: bool = False) -> Array: ...
@overload
def sdpa(q: Array, k: Array, v: Optional[Array], attn_mask: Optional[Any] = None, dropout_p: float = 0.0, is_causal: bool = False,
         *, causal_align: Optional[Literal["top_left", "bottom_right"]] = None, scale: Optional[float] = None,
         enable_gqa: bool = False, kv_lens: Optional[Any] = None, return_lse: Literal[True],
         layout: Literal["bhsd", "bshd"] = "bhsd", out: Optional[Array] = None, q_scale: Scale = None,
         k_scale: Scale = None, v_scale: Scale = None, window: Window = None, softcap: Optional[float] = None,
         sinks: Optional[Any] = None, kv_starts: Optional[Any] = None, alibi_slopes: Optional[Any] = None,
         chunk: Optional[int] = None, ranges: Optional[Any] = None, tree: Optional[Any] = None,
         q_offsets: Optional[Any] = None, kv_offsets: Optional[Any] = None, max_q_len: Optional[int] = None,
         max_kv_len: Optional[int] = None, cu_seqlens_q: Optional[Any] = None, cu_seqlens_k: Optional[Any] = None,
         max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
         page_table: Optional[Any] = None, v_dim: Optional[int] = None, invariant: bool = False) -> Tuple[Array, Array]: ...
def explain(q: Array, k: Array, v: Optional[Array], attn_mask: Optional[Any] = None, dropout_p: float = 0.0,
            is_causal: bool = False, *, causal_align: Optional[Literal["top_left", "bottom_right"]] = None,
            scale: Optional[float] = None, enable_gqa: bool = False, kv_lens: Optional[Any] = None,
            return_lse: bool = False, layout: Literal["bhsd", "bshd"] = "bhsd", out: Optional[Array] = None,
            q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None, window: Window = None,
            softcap: Optional[float] = None, sinks: Optional[Any] = None, kv_starts: Optional[Any] = None,
            alibi_slopes: Optional[Any] = None, chunk: Optional[int] = None, ranges: Optional[Any] = None,
            tree: Optional[Any] = None, q_offsets: Optional[Any] = None, kv_offsets: Optional[Any] = None,
            max_q_len: Optional[int] = None, max_kv_len: Optional[int] = None, cu_seqlens_q: Optional[Any] = None,
            cu_seqlens_k: Optional[Any] = None, max_seqlen_q: Optional[int] = None,
            max_seqlen_k: Optional[int] = None,
         page_table: Optional[Any] = None, v_dim: Optional[int] = None, invariant: bool = False) -> str: ...
def sdpa_paged(q: Array, k_cache: Array, v_cache: Optional[Array], page_table: Any, kv_lens: Any, *,
               is_causal: bool = False, causal_align: Optional[Literal["top_left", "bottom_right"]] = None,
               scale: Optional[float] = None, attn_mask: Optional[Any] = None, dropout_p: float = 0.0,
               return_lse: bool = False, layout: Literal["bhsd", "bshd"] = "bhsd", out: Optional[Array] = None,
               q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None, window: Window = None,
               softcap: Optional[float] = None, sinks: Optional[Any] = None, kv_starts: Optional[Any] = None,
               alibi_slopes: Optional[Any] = None, chunk: Optional[int] = None, ranges: Optional[Any] = None,
               tree: Optional[Any] = None, q_offsets: Optional[Any] = None, max_q_len: Optional[int] = None,
               max_kv_len: Optional[int] = None, cu_seqlens_q: Optional[Any] = None,
               max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None, v_dim: Optional[int] = None,
               invariant: bool = False) -> Any: ...
def run(q: Array, k: Array, v: Array, **arguments_of_sdpa: Any) -> Union[Array, Tuple[Array, Array]]: ...
def problem(*args: Any, **arguments_of_sdpa: Any) -> Optional[bytes]: ...
def plan_text(problem: bytes, device_type: int, device: int) -> str: ...
def gradient_problem(problem: bytes) -> bytes: ...
def xla_handlers() -> Tuple[object, object]: ...
def gradients(d_o: Array, o: Array, lse: Array, dq: Array, dk: Array, dv: Array, dsinks: Optional[Array], q: Array,
              k: Array, v: Array, **arguments_of_sdpa: Any) -> None: ...
def forget_plans() -> None: ...
def import_wisdom(path: str, device_type: int, device: int) -> Tuple[int, int, int]: ...
def bind_aten(*helpers: Any) -> None: ...
def aten_operator(name: str, call: Any, keys: Any, counts: Any, tell: Any) -> Any: ...
def bind_torch(*objects: Any) -> None: ...
def merge(outs: Any, lses: Any, out: Any, out_lse: Any, layout: int) -> None: ...
def append(tensors: Any, numbers: Tuple[int, int, int, float, float]) -> None: ...
def group_id(library: Optional[str]) -> bytes: ...
def group_open(device_type: int, device: int, rank: int, ranks: int, id: bytes, library: Optional[str],
               timeout_ms: int, max_ctas: int) -> object: ...
def group_close(group: object) -> None: ...
def group_wait(group: object, stream: int, timeout_ms: int) -> None: ...
def group_plan(group: object) -> Optional[Tuple[str, int, int]]: ...
def group_refuse(group: object, text: str) -> None: ...
def group_sdpa(group: object, schedule: int, placement: int, q_len: int, kv_len: int, q: Array, k: Array, v: Array,
               **arguments_of_sdpa: Any) -> Any: ...
def shard_rows(length: int, ranks: int, rank: int, placement: int) -> Tuple[Tuple[int, int], Tuple[int, int]]: ...
def parse_problem(text: str) -> Tuple[str, Dict[str, int]]: ...
