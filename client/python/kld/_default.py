"""The connections of those who name none: one for each process, made at its first use; where it is local:,
one for each GPU whose tensors come along, and one for PyTorch's tensors on the CPU, with as many threads as PyTorch
computes with."""
from __future__ import annotations

import os
import threading
from typing import Dict, Optional, Tuple

from ._connection import Connection

_lock = threading.RLock()
Key = Tuple[int, Optional[int], Optional[int]]  # process (a forked child makes its own), GPU, threads
_made: Dict[Key, Connection] = {}
THREADS_MAX = 1024  # that libkld takes
COUNTS_MAX = 4  # of threads, at once: an older connection ends with its last request


def default_connection(gpu: Optional[int] = None) -> Connection:
    """To the environment's KLD_SERVER, else "local:" (for tensors on a GPU: "local:cuda:N"). Closed, it is made
    anew."""
    return _default("local:" if gpu is None else f"local:cuda:{gpu}", gpu)


def for_cpu_tensors(threads: int) -> Connection:
    """The same for PyTorch's, which are not sent to a GPU where nobody said so: else "local:cpu"."""
    return _default("local:cpu", None, min(threads, THREADS_MAX))


def made_for_cpu_tensors(threads: int) -> Optional[Connection]:
    """That one, if it is there and open."""
    return _made_for(None, min(threads, THREADS_MAX))


def made_for_gpu(gpu: int) -> Optional[Connection]:
    """The same of default_connection()."""
    return _made_for(gpu, None)


def _made_for(gpu: Optional[int], threads: Optional[int]) -> Optional[Connection]:
    connection = _made.get(_key(os.environ.get("KLD_SERVER"), gpu, threads))
    return None if connection is None or connection.closed else connection


def _key(server: Optional[str], gpu: Optional[int], threads: Optional[int]) -> Key:
    if server and not server.startswith("local:"):
        threads = None
    return os.getpid(), None if server and server.startswith(("http", "split:")) else gpu, threads


def _default(here: str, gpu: Optional[int], threads: Optional[int] = None) -> Connection:
    with _lock:
        server = os.environ.get("KLD_SERVER")
        key = _key(server, gpu, threads)
        threads = key[2]
        connection = _made.get(key)
        if connection is None or connection.closed:
            connection = Connection(server or here, threads=threads or 0)
            if threads is not None:
                counts = [other for other in _made if other[2] is not None]
                for other in counts[:max(0, len(counts) + 1 - COUNTS_MAX)]:
                    del _made[other]
            _made[key] = connection
        return connection


def _after_fork() -> None:
    global _lock  # another thread of the parent may have held it
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
