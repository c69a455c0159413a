"""The exceptions: one for each kind of status of acromion.h, each also what Python calls such a failure."""
import re


class Error(RuntimeError):
    """The library refused or failed. `status` is the number of an acr_status in acromion.h; -1: invalid argument."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class InvalidError(Error, ValueError):
    """An argument is wrong; the message names it, its value and what is allowed."""


class UnsupportedError(Error, NotImplementedError):
    """No kernel can run this; the message is the reason of the one that came nearest."""


class DeviceError(Error):
    """There is no such device, its driver is missing or too old, or it reported an error."""


class OutOfMemoryError(Error, MemoryError):
    """No memory on the host or the device."""


class PeerError(Error):
    """Another rank failed, ended, or has other arguments; after one of an execution the group is broken."""


class PeerTimeoutError(PeerError, TimeoutError):
    """Another rank did not answer in time: the group is broken."""


_CLASSES = {-1: InvalidError, -2: UnsupportedError, -3: DeviceError, -4: OutOfMemoryError, -9: InvalidError,
            -10: DeviceError, -11: InvalidError, -12: PeerError, -13: PeerTimeoutError}


# What the library's texts name by fields of C, with the argument that it was.
_FIELDS = {"o": "out", "q_scales": "q_scale", "k_scales": "k_scale", "v_scales": "v_scale"}
_FIELD = re.compile(r"\bbuffers\.(\w+)|\b([qkv]_scales)\b")


def from_status(status: int, message: str) -> Error:
    """The exception for an acr_status. Fields of C become arguments of acromion.sdpa in its text."""
    text = _FIELD.sub(lambda found: _FIELDS.get(found[1] or found[2], found[1] or found[2]), message)
    return _CLASSES.get(status, Error)(text, status)
