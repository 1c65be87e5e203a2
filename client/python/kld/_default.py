"""The connections of those who name none: one for each process, made at its first use; where it is local:,
one for each GPU whose tensors come along."""
from __future__ import annotations

import os
import threading
from typing import Dict, Optional, Tuple

from ._connection import Connection

_lock = threading.RLock()
_made: Dict[Tuple[int, Optional[int]], Connection] = {}  # by process: a forked child makes its own


def default_connection(gpu: Optional[int] = None) -> Connection:
    """To the environment's KLD_SERVER, else "local:" (for tensors on a GPU: "local:cuda:N"). Closed, it is made
    anew."""
    with _lock:
        server = os.environ.get("KLD_SERVER")
        url = server or ("local:" if gpu is None else f"local:cuda:{gpu}")
        key = os.getpid(), None if server and server.startswith(("http", "split:")) else gpu
        connection = _made.get(key)
        if connection is None or connection.closed:
            connection = Connection(url)
            _made[key] = connection
        return connection


def _after_fork() -> None:
    global _lock  # another thread of the parent may have held it
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
