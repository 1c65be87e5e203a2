"""Opening a connection: its URL, whose certificates are trusted, and the wait for the other end, which takes no lock."""
from __future__ import annotations

import _thread
import ctypes as c
import os
import sys
import threading
from typing import Any, List, Optional, Sequence, Union

from . import _library
from ._errors import KldTypeError, KldValueError, Status

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # where Debian's libcurl, which a wheel brings, has the system's


def certificates(url: str, ca_file: Optional[str]) -> Optional[bytes]:
    if ca_file is None and "https:" in url and not os.path.exists(CERTIFICATES):
        import ssl
        ca_file = ssl.get_default_verify_paths().cafile  # where this system has them
    return None if ca_file is None else os.fsencode(ca_file)


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
