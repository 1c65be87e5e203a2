"""GPU memory, streams and events of this process, through the NVIDIA driver (ctypes over libcuda.so.1):
what a tensor's allocation is and how another process opens it, events that two processes share, copies.
Knows no torch and no request; _device.py decides what to do with it. Loaded at the first tensor on a GPU.

The context is the device's primary one, which CUDA's runtime, and so PyTorch, CuPy and JAX, use; `current()`
makes it the thread's for a while. Any thread.
"""
from __future__ import annotations

import ctypes as c
import functools
import os
from contextlib import contextmanager
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

from . import _ptx
from ._errors import KldError, KldUnsupportedError, Status

HANDLE_BYTES = 64
_POSIX_FD = 1
_INTERPROCESS = 6  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
# CU_POINTER_ATTRIBUTE_: MEMORY_TYPE, BUFFER_ID, DEVICE_ORDINAL, IS_LEGACY_CUDA_IPC_CAPABLE,
# RANGE_START_ADDR, RANGE_SIZE
_ATTRIBUTES = (2, 7, 9, 10, 11, 12)
_NAMES = {1: "an argument is wrong", 2: "out of memory", 100: "no GPU", 201: "no context", 700: "a kernel failed",
          801: "not supported"}


class _Handle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * HANDLE_BYTES)]


class Allocation(NamedTuple):
    """What the driver knows of an address."""

    ordinal: int
    base: int
    size: int  #: of the allocation; of memory mapped in pieces (expandable segments), of the piece
    identity: int  #: no other allocation of this process ever has it
    has_handle: bool  #: a cudaIpcMemHandle_t can be had


class Driver:
    """libcuda.so.1. Errors are KldError."""

    def __init__(self) -> None:
        try:
            self.library = c.CDLL("libcuda.so.1")
        except OSError as error:
            raise KldUnsupportedError(Status.UNIMPLEMENTED, f"no NVIDIA driver here: {error}") from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise KldError(Status.INTERNAL, f"{name}: {_NAMES.get(status, 'failed')} (CUDA error {status})")

    def look_up(self, address: int) -> Optional[Allocation]:
        """None: not memory of a GPU."""
        kind, ordinal, legacy = c.c_uint(), c.c_int(), c.c_int()
        identity, size, base = c.c_uint64(), c.c_size_t(), c.c_uint64()
        data = (c.c_void_p * 6)(*(c.addressof(field) for field in
                                  (kind, identity, ordinal, legacy, base, size)))
        status = self.library.cuPointerGetAttributes(c.c_uint(6), _ATTRIBUTE_LIST, data, c.c_uint64(address))
        if status or kind.value != _DEVICE_MEMORY:
            return None
        return Allocation(ordinal.value, base.value, size.value, identity.value, bool(legacy.value))

    def handle_of(self, base: int) -> bytes:
        """The cudaIpcMemHandle_t of an allocation."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", c.byref(handle), c.c_uint64(base))
        return bytes(handle.bytes)

    def descriptor_of(self, base: int) -> int:
        """A file descriptor of an allocation that is mapped by hand; the caller closes it."""
        handle, fd = c.c_uint64(), c.c_int(-1)
        self.call("cuMemRetainAllocationHandle", c.byref(handle), c.c_void_p(base))
        try:
            self.call("cuMemExportToShareableHandle", c.byref(fd), handle, c.c_int(_POSIX_FD), c.c_uint64(0))
        finally:
            self.library.cuMemRelease(handle)
        return fd.value


_ATTRIBUTE_LIST = (c.c_uint * 6)(*_ATTRIBUTES)


class Gpu:
    """One device and its primary context."""

    def __init__(self, ordinal: int) -> None:
        self.driver, self.ordinal = driver(), ordinal
        device, uuid = c.c_int(), (c.c_ubyte * 16)()
        self._context = c.c_void_p()
        self.driver.call("cuDeviceGet", c.byref(device), c.c_int(ordinal))
        self.driver.call("cuDeviceGetUuid", uuid, device)
        self.driver.call("cuDevicePrimaryCtxRetain", c.byref(self._context), device)
        self.uuid = bytes(uuid)
        self._kernels: Dict[str, c.c_void_p] = {}
        self._module = c.c_void_p()

    @contextmanager
    def current(self) -> Iterator[None]:
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.driver.library.cuCtxPopCurrent_v2(c.byref(c.c_void_p()))

    # What follows runs inside current(). A stream is a CUstream's number; 0 is the default stream.

    def event(self) -> Tuple[c.c_void_p, bytes]:
        """An event, and the handle by which another process opens it."""
        event, handle = c.c_void_p(), _Handle()
        self.driver.call("cuEventCreate", c.byref(event), c.c_uint(_INTERPROCESS))
        self.driver.call("cuIpcGetEventHandle", c.byref(handle), event)
        return event, bytes(handle.bytes)

    def open_event(self, handle: bytes) -> c.c_void_p:
        event = c.c_void_p()
        self.driver.call("cuIpcOpenEventHandle", c.byref(event), _Handle.from_buffer_copy(handle))
        return event

    def close_event(self, event: c.c_void_p) -> None:
        self.driver.library.cuEventDestroy_v2(event)

    def record(self, event: c.c_void_p, stream: int) -> None:
        self.driver.call("cuEventRecord", event, c.c_void_p(stream))

    def wait(self, stream: int, event: c.c_void_p) -> None:
        self.driver.call("cuStreamWaitEvent", c.c_void_p(stream), event, c.c_uint(0))

    def is_captured(self, stream: int) -> bool:
        """Into a graph."""
        status = c.c_int()
        self.driver.library.cuStreamIsCapturing(c.c_void_p(stream), c.byref(status))
        return status.value != 0

    def finish(self, stream: int) -> None:
        self.driver.call("cuStreamSynchronize", c.c_void_p(stream))

    def allocate(self, size: int) -> int:
        at = c.c_uint64()
        self.driver.call("cuMemAlloc_v2", c.byref(at), c.c_size_t(size))
        return int(at.value)

    def free(self, at: int) -> None:
        self.driver.library.cuMemFree_v2(c.c_uint64(at))

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Between two places on devices."""
        self.driver.call("cuMemcpyDtoDAsync_v2", c.c_uint64(to), c.c_uint64(source), c.c_size_t(size),
                         c.c_void_p(stream))

    def copy_rows(self, to: int, source: int, strides: Tuple[int, int], row_bytes: int, rows: int,
                  stream: int) -> None:
        """Rows at other distances; strides: of `to` and of `source`, in bytes."""
        self.driver.call("cuMemcpy2DAsync_v2", c.byref(_Copy(
            source_type=_DEVICE_MEMORY, source=source, source_pitch=strides[1], to_type=_DEVICE_MEMORY, to=to,
            to_pitch=strides[0], row_bytes=row_bytes, rows=rows)), c.c_void_p(stream))

    def scale(self, at: int, dtype: str, count: int, factor: int, factor_dtype: str, stream: int) -> None:
        """Multiplies an array by a number on the device (_ptx.py)."""
        name = _ptx.entry_name(dtype, factor_dtype)
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernel(name)
        arguments = [c.c_uint64(at), c.c_uint64(factor), c.c_uint64(count)]
        pointers = (c.c_void_p * 3)(*map(c.addressof, arguments))
        blocks, threads = _ptx.grid(count, {"float32": 4, "float64": 8}.get(dtype, 2))
        one = c.c_uint(1)
        self.driver.call("cuLaunchKernel", kernel, c.c_uint(blocks), one, one, c.c_uint(threads), one, one,
                         c.c_uint(0), c.c_void_p(stream), pointers, None)

    def _kernel(self, name: str) -> c.c_void_p:
        if not self._module:
            module = c.c_void_p()
            self.driver.call("cuModuleLoadData", c.byref(module), c.c_char_p(_ptx.source()))
            self._module = module
        kernel = c.c_void_p()
        self.driver.call("cuModuleGetFunction", c.byref(kernel), self._module, c.c_char_p(name.encode()))
        self._kernels[name] = kernel
        return kernel


class _Copy(c.Structure):  # CUDA_MEMCPY2D
    _fields_ = [("source_x", c.c_size_t), ("source_y", c.c_size_t), ("source_type", c.c_uint),
                ("source_host", c.c_void_p), ("source", c.c_uint64), ("source_array", c.c_void_p),
                ("source_pitch", c.c_size_t), ("to_x", c.c_size_t), ("to_y", c.c_size_t), ("to_type", c.c_uint),
                ("to_host", c.c_void_p), ("to", c.c_uint64), ("to_array", c.c_void_p),
                ("to_pitch", c.c_size_t), ("row_bytes", c.c_size_t), ("rows", c.c_size_t)]


@functools.lru_cache(maxsize=None)
def _driver_of(process: int) -> Driver:
    return Driver()


@functools.lru_cache(maxsize=None)
def _gpu_of(process: int, ordinal: int) -> Gpu:
    return Gpu(ordinal)


def driver() -> Driver:
    return _driver_of(os.getpid())


def gpu(ordinal: int) -> Gpu:
    return _gpu_of(os.getpid(), ordinal)
