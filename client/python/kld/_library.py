"""libkld through ctypes: finding it, its structs and its functions (client/kld.h, proto/op.h). Nothing here
computes, and nothing outside this file knows where the library is.

Looked for, in this order: beside the package (kld/lib, where a wheel brings it), the file that the
environment variable KLD_LIBRARY names, the system's libkld.so.0. Loaded at the first use, once, by
whichever thread comes first; its version must be the package's. ctypes releases the interpreter's lock
during each call.
"""
from __future__ import annotations

import ctypes as c
import functools
import os
import pathlib
from typing import Any, Dict, Tuple

from ._errors import KldValueError, Status, from_status
from ._version import __version__

RANK_MAX = 8
ERROR_TEXT_MAX = 256

# proto/op.h; tests/e2e/test_python_library.py holds these against the library.
SLOTS = ("predictions", "targets", "row_weights", "row_mask", "grad_output", "loss", "row_loss",
         "grad_predictions", "grad_targets")
SLOT: Dict[str, int] = {name: number for number, name in enumerate(SLOTS)}
NUMBERS = ("temperature", "beta", "skew", "weight", "scale", "normalizer", "grad_output")
FORMS = ("probs", "logprobs", "logits")
DTYPE: Dict[str, int] = {"float32": 1, "float64": 2, "float16": 3, "bfloat16": 4, "uint8": 5, "bool": 6}
ITEM_BYTES = {1: 4, 2: 8, 3: 2, 4: 2, 5: 1, 6: 1}


class Error(c.Structure):
    _fields_ = [("status", c.c_int), ("text", c.c_char * ERROR_TEXT_MAX)]


class Tensor(c.Structure):
    _fields_ = [("dtype", c.c_uint32), ("reserved", c.c_uint32), ("region", c.c_uint64),
                ("offset_bytes", c.c_uint64), ("row_stride_bytes", c.c_uint64)]


class Op(c.Structure):
    _fields_ = [("divergence", c.c_uint32), ("reduction", c.c_uint32),
                ("predictions_form", c.c_uint32), ("targets_form", c.c_uint32),
                ("rank", c.c_uint32), ("given", c.c_uint32), ("shape", c.c_uint64 * RANK_MAX),
                ("number", c.c_double * len(NUMBERS)), ("tensor", Tensor * len(SLOTS))]


class Bytes(c.Structure):
    _fields_ = [("data", c.c_void_p), ("region", c.c_void_p), ("offset_bytes", c.c_uint64)]


class Request(c.Structure):
    _fields_ = [("op", Op), ("bytes", Bytes * len(SLOTS)), ("stream", c.c_uint32),
                ("timeout_ns", c.c_uint64), ("wait", c.c_void_p), ("record", c.c_void_p),
                ("early", c.c_bool), ("trace", c.c_uint8 * 25)]


class Result(c.Structure):
    _fields_ = [("loss", c.c_double), ("scalar", c.c_bool), ("queue_ns", c.c_uint64),
                ("copy_ns", c.c_uint64), ("kernel_ns", c.c_uint64), ("bytes", c.c_uint64),
                ("total_ns", c.c_uint64), ("attempts", c.c_uint32), ("fence_number", c.c_uint32)]


class ConnectOptions(c.Structure):
    _fields_ = [("client_name", c.c_char_p), ("connect_timeout_ns", c.c_uint64), ("lazy", c.c_bool),
                ("staging_bytes_max", c.c_uint64), ("token", c.c_char_p), ("ca_file", c.c_char_p),
                ("threads", c.c_uint32), ("pool_bytes_max", c.c_uint64), ("progress", c.c_void_p),
                ("progress_user", c.c_void_p), ("part_bytes_max", c.c_uint64), ("part_timeout_ns", c.c_uint64),
                ("cert_file", c.c_char_p), ("key_file", c.c_char_p)]


class ServerInfo(c.Structure):
    _fields_ = [("backend", c.c_char * 16), ("device", c.c_char * 64), ("epoch", c.c_uint64),
                ("region_bytes_max", c.c_uint64), ("requests_max", c.c_uint32),
                ("streams_max", c.c_uint32), ("events_max", c.c_uint32),
                ("device_uuid", c.c_uint8 * 16), ("device_index", c.c_uint32), ("devices", c.c_uint32),
                ("version", c.c_char * 24)]


class ServerStats(c.Structure):
    _fields_ = [("epoch", c.c_uint64), ("uptime_ns", c.c_uint64), ("requests_total", c.c_uint64),
                ("errors_total", c.c_uint64), ("in_flight", c.c_uint32), ("clients", c.c_uint32),
                ("regions", c.c_uint64), ("region_bytes", c.c_uint64), ("pool_bytes", c.c_uint64),
                ("pool_bytes_max", c.c_uint64), ("kernel_ns_total", c.c_uint64),
                ("bytes_total", c.c_uint64)]


class TensorView(c.Structure):
    _fields_ = [("dtype", c.c_uint32), ("form", c.c_uint32), ("rank", c.c_uint32),
                ("owner_uid", c.c_uint32), ("shape", c.c_uint64 * RANK_MAX),
                ("row_stride_bytes", c.c_uint64), ("offset_bytes", c.c_uint64)]


_P = c.POINTER
_HANDLE, _OUT = c.c_void_p, _P(c.c_void_p)
# name -> what it returns, its arguments but for the struct kld_error that closes them where it returns a
# status (int).
_FUNCTIONS: Dict[str, Tuple[Any, Tuple[Any, ...]]] = {
    "kld_connect": (c.c_int, (c.c_char_p, _P(ConnectOptions), _OUT)),
    "kld_info": (c.c_int, (_HANDLE, _P(ServerInfo))),
    "kld_ping": (c.c_int, (_HANDLE, _P(c.c_uint64))),
    "kld_stats": (c.c_int, (_HANDLE, _P(ServerStats))),
    "kld_region_import_memfd": (c.c_int, (_HANDLE, c.c_int, c.c_uint64, _OUT)),
    "kld_region_import_cuda_ipc": (c.c_int, (_HANDLE, c.c_char_p, c.c_char_p, c.c_uint64, c.c_uint64,
                                             c.c_uint64, _OUT)),
    "kld_region_import_cuda_fd": (c.c_int, (_HANDLE, c.c_int, c.c_char_p, c.c_uint64, c.c_uint64,
                                            c.c_uint64, _OUT)),
    "kld_region_reserve_cuda": (c.c_int, (_HANDLE, c.c_char_p, c.c_uint64, _OUT)),
    "kld_region_grow_cuda_fd": (c.c_int, (_HANDLE, c.c_int, c.c_uint64)),
    "kld_publish": (c.c_int, (_HANDLE, c.c_char_p, _HANDLE, _P(TensorView), _P(c.c_uint32), c.c_uint32)),
    "kld_published": (c.c_int, (_HANDLE, c.c_char_p)),
    "kld_detach": (c.c_int, (_HANDLE, c.c_char_p)),
    "kld_attach": (c.c_int, (_HANDLE, c.c_char_p, c.c_uint64, _OUT, _P(TensorView))),
    "kld_attach_from": (c.c_int, (_HANDLE, c.c_uint32, c.c_char_p, c.c_uint64, _OUT, _P(TensorView))),
    "kld_event_import": (c.c_int, (_HANDLE, c.c_char_p, c.c_char_p, _OUT)),
    "kld_event_create": (c.c_int, (_HANDLE, c.c_void_p, _OUT)),
    "kld_fence_create": (c.c_int, (_HANDLE, _OUT, _OUT)),
    "kld_fence_passed": (c.c_bool, (_HANDLE, c.c_uint32)),
    "kld_stream_adopt": (c.c_int, (_HANDLE, c.c_uint32, c.c_void_p)),
    "kld_run_slice": (c.c_int, (_HANDLE, _P(Request), c.c_uint32, _P(c.c_uint64), _P(Result))),
    "kld_wait_slice": (c.c_int, (_HANDLE, _P(c.c_uint64), c.c_uint32, _P(Result))),
    "kld_run": (c.c_int, (_HANDLE, _P(Request), _P(Result))),
    "kld_measure_ceiling": (c.c_int, (_HANDLE, c.c_uint64, _P(c.c_double), _P(c.c_double))),
    "kld_cancel": (None, (_HANDLE, c.c_uint64)),
    "kld_event_drop": (None, (_HANDLE,)),
    "kld_op_set_text": (c.c_int, (_P(Op), c.c_char_p, c.c_char_p)),
    "kld_op_set_number": (c.c_int, (_P(Op), c.c_char_p, c.c_double)),
    "kld_op_init": (None, (_P(Op),)),
    "kld_close": (None, (_HANDLE,)),
    "kld_losses": (c.c_uint64, (_HANDLE,)),
    "kld_region_drop": (None, (_HANDLE,)),
    "kld_status_name": (c.c_char_p, (c.c_int,)),
    "kld_status_known": (c.c_int, (c.c_uint,)),
    "kld_dtype_name": (c.c_char_p, (c.c_uint32,)),
    "kld_dtype_bytes": (c.c_uint32, (c.c_uint32,)),
    "kld_slot_name": (c.c_char_p, (c.c_uint32,)),
    "kld_number_name": (c.c_char_p, (c.c_uint32,)),
    "kld_version": (c.c_char_p, ()),
}
_PLAIN = {"kld_status_known"}  # return an int that is no status


def find() -> str:
    """The library that will be loaded: a path, or a name for the system's loader."""
    beside = pathlib.Path(__file__).resolve().parent / "lib"
    for name in ("libkld.so.0", "libkld.so"):
        if (beside / name).exists():
            return str(beside / name)
    return os.environ.get("KLD_LIBRARY") or "libkld.so.0"


@functools.lru_cache(maxsize=None)
def library() -> c.CDLL:
    path = find()
    try:
        loaded = c.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype = result
            ends = (_P(Error),) if result is c.c_int and name not in _PLAIN else ()
            function.argtypes = (*arguments, *ends)
    except (OSError, AttributeError) as error:
        raise ImportError(f"kld: cannot load libkld: {error}. Install a wheel that brings it (`make wheel` "
                          "in kld's tree), name its file in KLD_LIBRARY, or install it for the system "
                          "(`make install`)") from error
    version = loaded.kld_version().decode()
    if version != __version__:
        raise ImportError(f"kld: {path} is libkld {version}, this package is {__version__} and needs the same")
    return loaded


def text(name: str, value: str) -> bytes:
    """A text for libkld, where a NUL would end it."""
    if "\0" in value:
        raise KldValueError(Status.INVALID, f"{name} {value!r} has a NUL")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise KldValueError(Status.INVALID, f"{name} {value!r} is no UTF-8") from None


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status; raises what is not KLD_OK."""
    error = Error()
    status = getattr(library(), name)(*arguments, c.byref(error))
    if status:
        raise from_status(status, error.text.decode(errors="replace"))
