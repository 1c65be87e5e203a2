"""Opening a connection: its URL, whose certificates are trusted, and the wait for the other end, which takes no lock."""
from __future__ import annotations

import _thread
import ctypes as c
import operator
import os
import sys
import threading
from typing import Any, List, Optional, Sequence, Union

import numpy as np

from . import _library
from ._checks import check_number
from ._errors import KldTypeError, KldValueError, Status

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # where Debian's libcurl, which a wheel brings, has the system's


def _path(name: str, value: Any) -> Optional[bytes]:
    if value is not None and not isinstance(value, (str, bytes, os.PathLike)):
        raise KldTypeError(Status.INVALID, f"{name} is a path, not {type(value).__name__}")
    path = None if value is None else os.fsencode(value)
    if path is not None and b"\0" in path:
        raise KldValueError(Status.INVALID, f"{name} {value!r} has a NUL")
    return path


def certificates(url: str, ca_file: Any) -> Optional[bytes]:
    if ca_file is None and "https:" in url and not os.path.exists(CERTIFICATES):
        import ssl
        ca_file = ssl.get_default_verify_paths().cafile  # where this system has them
    return _path("ca_file", ca_file)


def _text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise KldTypeError(Status.INVALID, f"{name} is a text, not {type(value).__name__}")
    return _library.text(name, value)


def check_whole(name: str, value: Any, most: int) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise KldTypeError(Status.INVALID, f"{name} is a whole number, not {type(value).__name__}") from None
    if not 0 <= number <= most:
        raise KldValueError(Status.INVALID, f"{name} is {number}; expected 0 to {most}")
    return number


def _nanoseconds(name: str, value: Any) -> int:
    seconds = check_number(name, value)
    if not 0 < seconds < 1e9:
        raise KldValueError(Status.INVALID, f"{name} is a number of seconds above 0 and below 1e9, not {value}")
    return max(1, int(seconds * 1e9))


def options_of(url: str, token: Any, ca_file: Any, client_name: Any, connect_timeout: Any, threads: Any,
               staging_bytes_max: Any, part_bytes_max: Any, part_timeout: Any, cert_file: Any,
               key_file: Any) -> _library.ConnectOptions:
    """As Connection() was given them."""
    return _library.ConnectOptions(
        client_name=_text("client_name", client_name), token=None if token is None else _text("token", token),
        connect_timeout_ns=_nanoseconds("connect_timeout", connect_timeout),
        part_timeout_ns=_nanoseconds("part_timeout", part_timeout),
        threads=check_whole("threads", threads, (1 << 32) - 1),
        staging_bytes_max=check_whole("staging_bytes_max", staging_bytes_max, (1 << 64) - 1),
        part_bytes_max=check_whole("part_bytes_max", part_bytes_max, (1 << 64) - 1), ca_file=certificates(url, ca_file),
        cert_file=_path("cert_file", cert_file), key_file=_path("key_file", key_file))


def one_url(url: Union[str, Sequence[str]]) -> str:
    """Several servers are one split connection."""
    if isinstance(url, str):
        return url
    if not isinstance(url, (list, tuple)) or not all(isinstance(one, str) for one in url):
        raise KldTypeError(Status.INVALID, f"url is a text or a list of texts, not {type(url).__name__}")
    if not url:
        raise KldValueError(Status.INVALID, "url is an empty list; expected at least one server")
    for one in url:
        if "," in one:
            raise KldValueError(Status.INVALID, f"{one!r} has a comma, which separates servers")
    return "split:" + ",".join(url)


def opened(url: str, options: _library.ConnectOptions) -> c.c_void_p:
    """Ctrl-C ends it at once: where a signal may come, and the other end is elsewhere, another thread waits, if there can be
    one (at the interpreter's end there cannot, or it would have no turn)."""
    def work() -> None:
        handle = c.c_void_p()
        try:
            _library.call("kld_connect", _library.text("url", url), c.byref(options), c.byref(handle))
        except BaseException as error:
            outcome.append(error)
            return
        with guard:
            if given_up:
                _library.library().kld_close(handle)
            else:
                outcome.append(handle)

    def work_elsewhere() -> None:
        work()
        over.release()

    outcome: List[Any] = []
    given_up: List[bool] = []
    started: List[int] = []
    guard, over = threading.Lock(), threading.Lock()
    if not (url.startswith("local:") or sys.is_finalizing() or threading.current_thread() is not threading.main_thread()):
        over.acquire()
        try:
            try:
                started.extend(map(_thread.start_new_thread, (work_elsewhere,), ((),)))  # no signal in between
            except RuntimeError:
                if started:  # it is a signal handler's
                    raise
            if started:
                over.acquire()
        except BaseException:
            with guard:
                given_up.append(True)
                if outcome and isinstance(outcome[0], c.c_void_p):
                    _library.library().kld_close(outcome[0])
            raise
    if not started:
        work()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    made: c.c_void_p = outcome[0]
    return made
