"""What the package offers, loaded with the compiled half. Where PyTorch is installed it is imported here, so that
acromion's operator exists before anything is compiled."""
import importlib.util
import os
from typing import Dict, NamedTuple, Union

from ._native import explain, forget_plans, sdpa, sdpa_paged
from ._errors import from_status
from ._native import import_wisdom as _import_wisdom
from ._native import version as __version__
from ._ops import append, merge

__all__ = ["__version__", "WisdomReport", "append", "explain", "fallbacks", "forget_plans", "import_wisdom", "merge",
           "register_torch", "register_transformers", "sdpa", "sdpa_paged"]

if importlib.util.find_spec("torch"):
    from . import _torch
    _torch.bind()

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's numbers


class WisdomReport(NamedTuple):
    """What an import did: facts taken, facts left out because they no longer hold, facts for other devices."""
    imported: int
    skipped: int
    other: int


def import_wisdom(path: Union[str, "os.PathLike[str]"], device: str = "cuda:0") -> WisdomReport:
    """Lets what `acromion bench` or the planner measured on this GPU model choose the kernels of `device` from now on:
    "cuda:N" or "cpu". The file's form: docs/manual/wisdom-format.md. All or nothing: a malformed file raises
    acromion.Error."""
    kind, _, index = device.partition(":")
    if kind not in _DEVICE_TYPES or not (index or "0").isdigit():
        raise ValueError(f"device is {device!r}, must be 'cpu', 'cuda' or 'cuda:N'")
    try:  # before the device is opened, whose driver may be missing, too
        open(path, "rb").close()
    except OSError as error:
        raise from_status(-7, f"cannot open {os.fspath(path)}: {error.strerror}") from error
    return WisdomReport(*_import_wisdom(os.fspath(path), _DEVICE_TYPES[kind], int(index or "0")))


def register_transformers() -> None:
    """Makes attn_implementation="acromion" known to Hugging Face's transformers. Again is harmless.

    Causal and bidirectional attention, grouped key/value heads, caches, and batches padded on the right are served;
    every other mask is refused with its reason when the model runs (docs/manual/python.md)."""
    from . import _transformers
    _transformers.register()


def register_torch(*, strict: bool = False) -> None:
    """Makes "ACROMION" known to torch.nn.attention.activate_flash_attention_impl, and activates nothing. `import
    acromion` after `import torch` has done so already.

    strict: while it is active, a call that acromion does not serve raises acromion.UnsupportedError in place of going
    to the kernel that PyTorch had."""
    from . import _aten
    _aten.register(strict)


def fallbacks() -> Dict[str, int]:
    """How many calls went to PyTorch's own kernel since "ACROMION" was activated last: "operator: reason" → calls."""
    from . import _aten
    return _aten.fallbacks()
