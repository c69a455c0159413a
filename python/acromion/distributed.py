"""Attention whose sequence is split over several GPUs, for programs that use torch.distributed. See
docs/manual/several-gpus.md.

Every function with `group` takes one of torch.distributed's process groups, None for all ranks. Keys and values travel
by copy engines where GPUs of one host reach each other, else by NCCL, over a communicator of acromion's own, whose id
travels over the process group, of any backend, once."""
import atexit
import contextlib
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist

from . import _native, _torch
from ._errors import from_status

__all__ = ["Plan", "close", "open", "plan", "rows", "sdpa", "shard", "wait"]

_torch.bind()
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's numbers
_PLACEMENTS = {"contiguous": 0, "zigzag": 1}
_TRANSFERS = {None: 0, "nccl": 1, "copy_engines": 2}
_SCHEDULES = {None: 0, "ring": 1, "gather": 2, "sharded_keys": 3}
_groups: Dict[Tuple[Any, torch.device], object] = {}


class Plan(NamedTuple):
    """What a call ran: the schedule and its kernels; bytes of memory it holds, and bytes it sends each time."""
    text: str
    memory: int
    traffic: int


# ---- Which rows a rank holds ----

def _number(table: Dict[Any, int], name: str, value: Any) -> int:
    if value not in table:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, table))}")
    return table[value]


def _process_group(group: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed has no process group: call torch.distributed.init_process_group first")
    found = dist.group.WORLD if group is None else group
    if dist.get_rank(found) < 0:
        raise ValueError("this process is no rank of group")
    return found


def rows(length: int, *, group: Any = None, placement: str = "zigzag") -> List[range]:
    """The positions that this rank holds of a sequence, in their order there: one range, with 'zigzag' two."""
    found = _process_group(group)
    pieces = _native.shard_rows(length, dist.get_world_size(found), dist.get_rank(found),
                                _number(_PLACEMENTS, "placement", placement))
    return [range(first, first + count) for first, count in pieces if count]


def shard(tensor: torch.Tensor, dim: int = 2, *, group: Any = None, placement: str = "zigzag") -> torch.Tensor:
    """This rank's rows of a whole tensor, contiguous. dim: that of the sequence; 2 of layout 'bhsd', 1 of 'bshd'."""
    pieces = [tensor.narrow(dim, piece.start, len(piece))
              for piece in rows(tensor.shape[dim], group=group, placement=placement)]
    return torch.cat(pieces, dim).contiguous()


# ---- Groups ----

def _key(group: Any, device: Any) -> Tuple[Any, torch.device]:
    found = torch.device(device)
    if found.type not in _DEVICE_TYPES:
        raise ValueError(f"device is {device}, must be 'cuda' or 'cpu'")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return _process_group(group), torch.device("cpu") if found.type == "cpu" else found


def _share_id(group: Any, library: Optional[str]) -> bytes:
    """Rank 0's id, or on every rank why it has none."""
    box: List[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            box = [_native.group_id(library)]
        except Exception as error:
            box = [(getattr(error, "status", -10), str(error))]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if isinstance(box[0], tuple):
        raise from_status(*box[0])
    return bytes(box[0])


def open(group: Any = None, *, device: Any = "cuda", library: Optional[str] = None, timeout: float = 60.0,
         max_ctas: int = 0, transfers: Optional[str] = None) -> None:
    """Makes the communicator of a group on a device, which sdpa does by itself when it is first called. Collective.

    library: path of NCCL's library; None finds libnccl.so.2, which PyTorch has loaded. NCCL exchanges memory of GPUs:
        on "cpu" it must be a library that exchanges memory of the host.
    timeout: seconds that a rank waits for the others.
    max_ctas: the most thread blocks that NCCL's transfers take from attention's; 0 as NCCL chooses.
    transfers: how keys and values travel: 'copy_engines', 'nccl', or None for copy engines where every rank can (plan()
        says which, and why). One rank that asks for 'nccl' is enough for all; where a rank cannot, 'copy_engines' fails
        on every rank when it is first called."""
    key = _key(group, device)
    way = _number(_TRANSFERS, "transfers", transfers)
    if key in _groups:
        raise ValueError(f"the group is open on {key[1]} already: close it first")
    if not 0 < timeout <= 4e6:
        raise ValueError(f"timeout is {timeout}, must be positive and at most 4e6 seconds")
    if key[1].type == "cpu" and library is None:
        raise ValueError("library is missing: NCCL exchanges memory of GPUs, and the device is the CPU")
    found, where = key
    _groups[key] = _native.group_open(_DEVICE_TYPES[where.type], where.index or 0, dist.get_rank(found),
                                      dist.get_world_size(found), _share_id(found, library), library,
                                      max(int(timeout * 1000), 1), max_ctas, way)


def _opened(group: Any, device: Any) -> object:
    key = _key(group, device)
    if key not in _groups:
        raise ValueError(f"the group is not open on {key[1]}: nothing was computed there yet")
    return _groups[key]


def close(group: Any = None, *, device: Any = "cuda") -> None:
    """Frees a group's plans and communicator, when its work has ended; before torch.distributed.destroy_process_group.
    A group whose communicator is broken is closed and opened again. Groups that were never opened are left alone."""
    capsule = _groups.pop(_key(group, device), None)
    if capsule is not None:
        _native.group_close(capsule)


def wait(group: Any = None, *, device: Any = "cuda", timeout: float = 60.0) -> None:
    """Waits until the work on the current stream has ended, at most so many seconds, and raises what went wrong on the
    way: acromion.PeerError for another rank that failed, acromion.PeerTimeoutError for one that does not answer."""
    key = _key(group, device)
    stream = torch.cuda.current_stream(key[1]).cuda_stream if key[1].type == "cuda" else 0
    _native.group_wait(_opened(*key), stream, max(int(timeout * 1000), 0))


def plan(group: Any = None, *, device: Any = "cuda") -> Optional[Plan]:
    """What the last call of sdpa ran; None before the first."""
    found = _native.group_plan(_opened(group, device))
    return None if found is None else Plan(*found)


# A communicator is left by all ranks together or not at all, and so never at the end of a process.
atexit.register(_groups.clear)


# ---- Attention ----

def _check_tensors(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, must be a "
                            "torch.Tensor")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name} requires a gradient, and attention over several ranks has none: call "
                                      "under torch.no_grad(), or give tensors from .detach()")


@contextlib.contextmanager
def _telling(group: Any, device: Optional[torch.device]) -> Iterator[None]:
    """What is refused inside is told to the other ranks. device: None where not even that is known; then the group is
    that of the only device which has one."""
    try:
        yield
    except Exception as error:
        found = _process_group(group)
        opened = [capsule for (of, where), capsule in _groups.items() if of == found and device in (None, where)]
        if len(opened) == 1:
            _native.group_refuse(opened[0], str(error).replace("\0", ""))
        raise


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any = None, q_len: Optional[int] = None,
         kv_len: Optional[int] = None, placement: str = "zigzag", schedule: Optional[str] = None,
         **arguments: Any) -> Any:
    """acromion.sdpa of a sequence that is split over the ranks of a group. Collective: every rank calls it, in the same
    order and with the same arguments, with its own rows of q, k and v (see rows), and gets its own rows of the output.

    q_len, kv_len: of the whole sequence; None where every rank holds as many rows.
    placement: 'zigzag', by which ranks have equal work under a causal mask, or 'contiguous'.
    schedule: 'ring', 'gather', or None for the planner's choice. 'sharded_keys' is decoding over a cache whose keys are
        split: every rank has the same q and keys of its own, with kv_lens, kv_starts and page_table of its own, and
        gets the whole output; shapes change on all ranks in the same call.
    arguments: acromion.sdpa's: is_causal, causal_align, scale, enable_gqa, window, softcap, sinks, return_lse, layout,
        out. What no schedule serves is refused by its name on every rank.

    On CUDA the work is enqueued on the current stream, without waiting, and may be captured into a graph when the same
    call has run before. A call that is refused on one rank raises acromion.PeerError on the others at once, if theirs
    is the first of its kind; ranks that have made such a call before wait until their time limit, as this one does."""
    key = _key(group, q.device) if isinstance(q, torch.Tensor) else None
    if key and key not in _groups:
        open(key[0], device=key[1])
    with _telling(group, key and key[1]):
        _check_tensors(q=q, k=k, v=v)
        numbers = (_number(_SCHEDULES, "schedule", schedule), _number(_PLACEMENTS, "placement", placement))
        for name, length in (("q_len", q_len), ("kv_len", kv_len)):
            if length is not None and (schedule == "sharded_keys" or length < 1):
                raise ValueError(f"{name} is {length}, must be " + (
                    "None with schedule='sharded_keys'" if schedule == "sharded_keys" else "positive"))
    assert key is not None  # q is a tensor
    return _native.group_sdpa(_groups[key], *numbers, q_len or 0, kv_len or 0, q, k, v, **arguments)
