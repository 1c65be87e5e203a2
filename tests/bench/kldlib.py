"""libkld through ctypes, for benchmarks and GPU checks that compare it with PyTorch in one process.

Only what those need: connect, run on addresses or CUDA IPC handles, statistics. Structs and functions are the Python
package's (client/python/kld/_library.py); the library's path is $KLD_LIBRARY, else build/libkld.so.
"""

import ctypes as c
import os
import pathlib
import sys

import argumentlib

HERE = pathlib.Path(__file__).resolve()
PACKAGE = next(p for p in (HERE.parents[2] / "client/python", HERE.parents[2] / "python") if (p / "kld").is_dir())
sys.path.insert(0, str(PACKAGE))
os.environ["KLD_LIBRARY"] = os.environ.get("KLD_LIBRARY") or str(
    HERE.parents[2] / "build" / "libkld.so")

from kld._errors import KldError  # noqa: E402
from kld._library import DTYPE, SLOT, Request, Result, ServerStats, call, library  # noqa: E402


def need():
    """Says that there is no libkld before anything is measured."""
    try:
        library()
    except ImportError as error:
        argumentlib.stop(error)


class Connection:
    """One kld_connection; its regions go with it."""

    def __init__(self, url):
        self._handle = c.c_void_p()
        call("kld_connect", url.encode(), None, c.byref(self._handle))

    def close(self):
        library().kld_close(self._handle)
        self._handle = c.c_void_p()

    def import_cuda_ipc(self, handle, uuid, base_bytes, offset_bytes, size):
        region = c.c_void_p()
        call("kld_region_import_cuda_ipc", self._handle, handle, uuid, base_bytes, offset_bytes, size,
             c.byref(region))
        return region

    def drop(self, region):
        library().kld_region_drop(region)

    def run(self, request):
        result = Result()
        call("kld_run", self._handle, c.byref(request), c.byref(result))
        return result

    def stats(self):
        stats = ServerStats()
        call("kld_stats", self._handle, c.byref(stats))
        return stats

    def ceiling(self, size):
        read, read_write = c.c_double(), c.c_double()
        call("kld_measure_ceiling", self._handle, size, c.byref(read), c.byref(read_write))
        return read.value, read_write.value


def request(shape, dtype, places, divergence=0, reduction=0, predictions_form=0, targets_form=0):
    """places: slot name -> an address (int) or a region (c_void_p from import_cuda_ipc)."""
    made = Request()
    library().kld_op_init(c.byref(made.op))
    made.op.divergence, made.op.reduction = divergence, reduction
    made.op.predictions_form, made.op.targets_form = predictions_form, targets_form
    made.op.rank = len(shape)
    for i, size in enumerate(shape):
        made.op.shape[i] = size
    for name, place in places.items():
        slot = SLOT[name]
        made.op.tensor[slot].dtype = DTYPE[dtype] if name not in ("loss", "row_loss") else 1
        if isinstance(place, int):
            made.bytes[slot].data = place
        else:
            made.bytes[slot].region = place
    return made


__all__ = ["Connection", "KldError", "need", "request"]
