"""Fused attention for PyTorch, NumPy and everything else that speaks DLPack: acromion.sdpa. See docs/manual/python.md.

Importing the package loads nothing: what needs the compiled half comes when it is first used. So the order of
`import acromion` and `import torch` does not matter, and `python3 -m acromion.bench` works without that half."""
import typing as _typing

from ._errors import DeviceError, Error, InvalidError, OutOfMemoryError, UnsupportedError

if _typing.TYPE_CHECKING:
    from ._api import __version__, explain, forget_plans, import_wisdom, register_transformers, sdpa

__all__ = ["DeviceError", "Error", "InvalidError", "OutOfMemoryError", "UnsupportedError", "__version__", "explain",
           "forget_plans", "import_wisdom", "register_transformers", "sdpa"]


def __getattr__(name: str) -> "_typing.Any":
    if name not in __all__:
        raise AttributeError(f"module 'acromion' has no attribute {name!r}")
    from . import _api
    found = {public: getattr(_api, public) for public in __all__ if hasattr(_api, public)}
    globals().update(found)
    return found[name]


def __dir__() -> "_typing.List[str]":
    return sorted(__all__)
