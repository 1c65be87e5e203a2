"""What libkld's outcomes are in Python: one exception class for each kind that a caller treats in a way
of its own, each also the built-in one that Python users expect. Texts are libkld's or the server's own.
"""
from __future__ import annotations

import enum
from typing import Any, Dict, Tuple, Type


class Status(enum.IntEnum):
    """enum kld_status (proto/status.h), number by number."""

    OK = 0
    INVALID = 1
    UNAUTHENTICATED = 2
    FORBIDDEN = 3
    NOT_FOUND = 4
    METHOD = 5
    DEADLINE = 6
    EXISTS = 7
    TOO_LARGE = 8
    MEDIA = 9
    THROTTLED = 10
    INTERNAL = 11
    UNIMPLEMENTED = 12
    BUSY = 13
    UNAVAILABLE = 14
    DEVICE_LOST = 15
    NO_MEMORY = 16
    CANCELLED = 17
    VERSION = 18
    GONE = 19


class KldError(Exception):
    """A request or a connection failed; `status` says how, str() in libkld's words."""

    status: Status
    is_unseen = False  # of a request that no device ever saw, at no attempt

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = Status(status)
        self.text = text

    def __str__(self) -> str:  # OSError, a base of some, would show its errno
        return self.text

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (int(self.status), self.text)


class KldValueError(KldError, ValueError):
    """The request is wrong (`Status.INVALID`), or over a limit that the text names (`TOO_LARGE`)."""


class KldTypeError(KldError, TypeError):
    """An argument is of a type or dtype that kld does not compute with."""


class KldTimeoutError(KldError, TimeoutError):
    """Not done within `timeout`."""


class KldConnectionError(KldError, ConnectionError):
    """No server, or it was lost with the request in flight, or it is shutting down."""


class KldBusyError(KldError):
    """The server has as much to do as it takes on; ask again."""


class KldPermissionError(KldError, PermissionError):
    """No token, or one (or a user) that may not do this."""


class KldLookupError(KldError, LookupError):
    """No such name, or its owner took it back."""


class KldMemoryError(KldError, MemoryError):
    """No memory, here or in the server."""


class KldUnsupportedError(KldError, NotImplementedError):
    """Known, but not over this kind of connection, or not with this back end."""


_CLASSES: Dict[Status, Type[KldError]] = {
    Status.INVALID: KldValueError,
    Status.TOO_LARGE: KldValueError,
    Status.UNAUTHENTICATED: KldPermissionError,
    Status.FORBIDDEN: KldPermissionError,
    Status.NOT_FOUND: KldLookupError,
    Status.GONE: KldLookupError,
    Status.DEADLINE: KldTimeoutError,
    Status.UNIMPLEMENTED: KldUnsupportedError,
    Status.THROTTLED: KldBusyError,
    Status.BUSY: KldBusyError,
    Status.UNAVAILABLE: KldConnectionError,
    Status.DEVICE_LOST: KldConnectionError,
    Status.VERSION: KldConnectionError,
    Status.NO_MEMORY: KldMemoryError,
}


def from_status(status: int, text: str) -> KldError:
    """The exception of an outcome that is not OK."""
    try:
        known = Status(status)
    except ValueError:  # of a newer libkld
        return KldError(Status.INTERNAL, f"status {status}: {text}")
    return _CLASSES.get(known, KldError)(known, text)
