"""libkld through ctypes, for benchmarks and GPU checks that compare it with PyTorch in one process.

Only what those need: connect, run on addresses or CUDA IPC handles, statistics. The structs mirror
proto/op.h and client/kld.h; the library's path is $KLD_LIB, else build/libkld.so.
"""

import ctypes as c
import os
import pathlib

SLOTS = ["predictions", "targets", "row_weights", "row_mask", "grad_output", "loss", "row_loss",
         "grad_predictions", "grad_targets"]
NUMBERS = ["temperature", "beta", "skew", "weight", "scale", "normalizer", "grad_output"]
DTYPES = {"float32": 1, "float64": 2, "float16": 3, "bfloat16": 4, "uint8": 5, "bool": 6}
ERROR_TEXT_MAX = 256


class Error(c.Structure):
    _fields_ = [("status", c.c_int), ("text", c.c_char * ERROR_TEXT_MAX)]


class Tensor(c.Structure):
    _fields_ = [("dtype", c.c_uint32), ("reserved", c.c_uint32), ("region", c.c_uint64),
                ("offset_bytes", c.c_uint64), ("row_stride_bytes", c.c_uint64)]


class Op(c.Structure):
    _fields_ = [("divergence", c.c_uint32), ("reduction", c.c_uint32),
                ("predictions_form", c.c_uint32), ("targets_form", c.c_uint32),
                ("rank", c.c_uint32), ("given", c.c_uint32), ("shape", c.c_uint64 * 8),
                ("number", c.c_double * len(NUMBERS)), ("tensor", Tensor * len(SLOTS))]


class Bytes(c.Structure):
    _fields_ = [("data", c.c_void_p), ("region", c.c_void_p), ("offset_bytes", c.c_uint64)]


class Request(c.Structure):
    _fields_ = [("op", Op), ("bytes", Bytes * len(SLOTS)), ("stream", c.c_uint32),
                ("timeout_ns", c.c_uint64), ("wait", c.c_void_p), ("record", c.c_void_p),
                ("early", c.c_bool)]


class Result(c.Structure):
    _fields_ = [("loss", c.c_double), ("scalar", c.c_bool), ("queue_ns", c.c_uint64),
                ("copy_ns", c.c_uint64), ("kernel_ns", c.c_uint64), ("bytes", c.c_uint64),
                ("total_ns", c.c_uint64), ("attempts", c.c_uint32)]


class ServerStats(c.Structure):
    _fields_ = [("epoch", c.c_uint64), ("uptime_ns", c.c_uint64), ("requests_total", c.c_uint64),
                ("errors_total", c.c_uint64), ("in_flight", c.c_uint32), ("clients", c.c_uint32),
                ("regions", c.c_uint64), ("region_bytes", c.c_uint64), ("pool_bytes", c.c_uint64),
                ("pool_bytes_max", c.c_uint64), ("kernel_ns_total", c.c_uint64),
                ("bytes_total", c.c_uint64)]


class KldError(RuntimeError):
    pass


_path = os.environ.get("KLD_LIB") or str(
    pathlib.Path(__file__).resolve().parents[2] / "build" / "libkld.so")
_lib = c.CDLL(_path)
_lib.kld_version.restype = c.c_char_p
_lib.kld_region_data.restype = c.c_void_p
_lib.kld_region_data.argtypes = [c.c_void_p]
_lib.kld_region_drop.argtypes = [c.c_void_p]
_lib.kld_close.argtypes = [c.c_void_p]


def _call(function, *arguments):
    error = Error()
    if function(*arguments, c.byref(error)):
        raise KldError(error.text.decode())


class Connection:
    """One kld_connection; its regions go with it."""

    def __init__(self, url):
        self._handle = c.c_void_p()
        _call(_lib.kld_connect, url.encode(), None, c.byref(self._handle))

    def close(self):
        _lib.kld_close(self._handle)
        self._handle = c.c_void_p()

    def import_cuda_ipc(self, handle, uuid, base_bytes, offset_bytes, size):
        region = c.c_void_p()
        _call(_lib.kld_region_import_cuda_ipc, self._handle, handle, uuid, c.c_uint64(base_bytes),
              c.c_uint64(offset_bytes), c.c_uint64(size), c.byref(region))
        return region

    def drop(self, region):
        _lib.kld_region_drop(region)

    def run(self, request):
        result = Result()
        _call(_lib.kld_run, self._handle, c.byref(request), c.byref(result))
        return result

    def stats(self):
        stats = ServerStats()
        _call(_lib.kld_stats, self._handle, c.byref(stats))
        return stats

    def ceiling(self, size):
        read, read_write = c.c_double(), c.c_double()
        _call(_lib.kld_measure_ceiling, self._handle, c.c_uint64(size), c.byref(read),
              c.byref(read_write))
        return read.value, read_write.value


def request(shape, dtype, places, divergence=0, reduction=0, predictions_form=0, targets_form=0):
    """places: slot name -> an address (int) or a region (c_void_p from import_cuda_ipc)."""
    made = Request()
    _lib.kld_op_init(c.byref(made.op))
    made.op.divergence, made.op.reduction = divergence, reduction
    made.op.predictions_form, made.op.targets_form = predictions_form, targets_form
    made.op.rank = len(shape)
    for i, size in enumerate(shape):
        made.op.shape[i] = size
    for name, place in places.items():
        slot = SLOTS.index(name)
        made.op.tensor[slot].dtype = DTYPES[dtype] if name not in ("loss", "row_loss") else 1
        if isinstance(place, int):
            made.bytes[slot].data = place
        else:
            made.bytes[slot].region = place
    return made
