"""The connection of those who name none: one for each process, made at its first use."""
from __future__ import annotations

import os
import threading
from typing import Dict

from ._connection import Connection

_lock = threading.Lock()
_made: Dict[int, Connection] = {}  # by process: a forked child makes its own


def default_connection() -> Connection:
    """To the environment's KLD_SERVER, else "local:". Closed, it is made anew."""
    with _lock:
        connection = _made.get(os.getpid())
        if connection is None or connection.closed:
            connection = Connection(os.environ.get("KLD_SERVER") or "local:")
            _made[os.getpid()] = connection
        return connection


def _after_fork() -> None:
    global _lock  # another thread of the parent may have held it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
