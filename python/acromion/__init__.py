"""Fused attention for PyTorch, NumPy and everything else that speaks DLPack: acromion.sdpa. See docs/manual/python.md.

Importing the package loads nothing: what needs the compiled half comes when it is first used, so that
`python3 -m acromion.bench` works without that half. Where PyTorch is loaded already, its registry of attention
implementations learns the name "ACROMION"; register_torch does so at any time."""
import sys as _sys
import typing as _typing

from ._errors import (
    DeviceError, Error, InvalidError, OutOfMemoryError, PeerError, PeerTimeoutError, UnsupportedError)

if _typing.TYPE_CHECKING:
    from ._api import (
        __version__, append, explain, fallbacks, forget_plans, import_wisdom, merge, register_torch,
        register_transformers, sdpa, sdpa_paged)

__all__ = ["DeviceError", "Error", "InvalidError", "OutOfMemoryError", "PeerError", "PeerTimeoutError",
           "UnsupportedError", "__version__", "append", "explain", "fallbacks", "forget_plans", "import_wisdom",
           "merge", "register_torch", "register_transformers", "sdpa", "sdpa_paged"]


def __getattr__(name: str) -> "_typing.Any":
    if name not in __all__:
        raise AttributeError(f"module 'acromion' has no attribute {name!r}")
    from . import _api
    found = {public: getattr(_api, public) for public in __all__ if hasattr(_api, public)}
    globals().update(found)
    return found[name]


def __dir__() -> "_typing.List[str]":
    return sorted(__all__)


def _register() -> None:
    """Tells PyTorch the name, if it is loaded and has a registry; the rest is loaded when somebody activates it."""
    def activate() -> "_typing.Any":
        from . import _aten
        return _aten.activate()
    tell = getattr(_sys.modules.get("torch.nn.attention"), "register_flash_attention_impl", None)
    if tell:
        tell("ACROMION", register_fn=activate)


_register()
