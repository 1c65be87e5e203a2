"""GPU memory, streams and events of this process, through the NVIDIA driver (ctypes over libcuda.so.1):
what a tensor's allocation is and how another process opens it, events that two processes share, copies.
Knows no torch and no request; _device.py decides what to do with it. Loaded at the first tensor on a GPU.

The context is the device's primary one, which CUDA's runtime, and so PyTorch, CuPy and JAX, use; `current()`
makes it the thread's for a while. Any thread.
"""
from __future__ import annotations

import ctypes as c
import functools
import itertools
import os
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

from . import _ptx
from ._errors import KldError, KldMemoryError, KldUnsupportedError, Status

HANDLE_BYTES = 64
_POSIX_FD = 1
_LOCAL, _INTERPROCESS = 2, 6  # CU_EVENT_DISABLE_TIMING, with it CU_EVENT_INTERPROCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NOT_READY = 600
# CUDA_SUCCESS, DEINITIALIZED, CONTEXT_IS_DESTROYED: nothing runs, and in a context that went nothing is pinned
_ENDED = (0, 4, 709)
_UNPINNED = (*_ENDED, 713)  # HOST_MEMORY_NOT_REGISTERED
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_PINNED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
# CU_POINTER_ATTRIBUTE_: MEMORY_TYPE, BUFFER_ID, DEVICE_ORDINAL, IS_LEGACY_CUDA_IPC_CAPABLE,
# RANGE_START_ADDR, RANGE_SIZE
_ATTRIBUTES = (2, 7, 9, 10, 11, 12)
_OUT_OF_MEMORY = 2
_NAMES = {1: "an argument is wrong", _OUT_OF_MEMORY: "out of memory", 100: "no GPU", 201: "no context", 700: "a kernel failed",
          801: "not supported"}


class _Handle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * HANDLE_BYTES)]


class Allocation(NamedTuple):
    """What the driver knows of an address."""

    ordinal: int
    base: int
    size: int  #: of the allocation; where memory is mapped by hand, of the range reserved for it
    identity: int  #: no other allocation of this process ever has it; mapped by hand, each piece has its own
    has_handle: bool  #: a cudaIpcMemHandle_t can be had


def failed(name: str, status: int) -> KldError:
    text = f"{name}: {_NAMES.get(status, 'failed')} (CUDA error {status})"
    return KldMemoryError(Status.NO_MEMORY, text) if status == _OUT_OF_MEMORY else KldError(Status.INTERNAL, text)


class Driver:
    """libcuda.so.1. Errors are KldError."""

    def __init__(self) -> None:
        try:
            self.library = c.CDLL("libcuda.so.1")
        except OSError as error:
            raise KldUnsupportedError(Status.UNIMPLEMENTED, f"no NVIDIA driver here: {error}") from None
        for name, types in _HOT.items():
            if hasattr(self.library, name):  # cuStreamWaitValue32_v2: since CUDA 11.7
                getattr(self.library, name).argtypes = types
        self._attributes = self.library.cuPointerGetAttributes
        self._attribute = self.library.cuPointerGetAttribute
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise failed(name, status)

    def look_up(self, address: int) -> Optional[Allocation]:
        """None: not memory of a GPU."""
        found = (c.c_uint64 * 6)()  # each at the start of a word of its own
        at = c.addressof(found)
        status = self._attributes(6, _ATTRIBUTE_LIST, (c.c_void_p * 6)(at, at + 8, at + 16, at + 24, at + 32, at + 40),
                                  address)
        kind, identity, ordinal, legacy, base, size = found
        if status or kind != _DEVICE_MEMORY:
            return None
        return Allocation(ordinal, base, size, identity, bool(legacy))

    def are(self, addresses: Sequence[int], identities: Sequence[int]) -> bool:
        """What look_up() says of their identity, and nothing else, in a fraction of its time."""
        count = len(addresses)
        found = (c.c_uint64 * count)()
        at = c.addressof(found)
        # Half the time of a loop: a tensor of 1 GiB has 52 pieces.
        if any(map(self._attribute, range(at, at + 8 * count, 8), itertools.repeat(_BUFFER_ID), addresses)):
            return False
        return found[:] == list(identities)

    def piece_of(self, address: int, allocation: Allocation) -> Tuple[int, int]:
        """Of memory mapped by hand: start and size of the piece that holds the address. The driver has no
        question for that, but tells pieces apart."""
        def is_same(at: int) -> bool:
            found = self.look_up(at)
            return found is not None and found.identity == allocation.identity

        start = address - address % _PIECE_UNIT
        end = start + _PIECE_UNIT
        while start > allocation.base and is_same(start - _PIECE_UNIT):
            start -= _PIECE_UNIT
        while end < allocation.base + allocation.size and is_same(end):
            end += _PIECE_UNIT
        return start, end - start

    def handle_of(self, base: int) -> bytes:
        """The cudaIpcMemHandle_t of an allocation."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", c.byref(handle), c.c_uint64(base))
        return bytes(handle.bytes)

    def descriptor_of(self, address: int) -> int:
        """A file descriptor of the piece at an address that is mapped by hand; the caller closes it."""
        handle, fd = c.c_uint64(), c.c_int(-1)
        self.call("cuMemRetainAllocationHandle", c.byref(handle), c.c_void_p(address))
        try:
            self.call("cuMemExportToShareableHandle", c.byref(fd), handle, c.c_int(_POSIX_FD), c.c_uint64(0))
        finally:
            self.library.cuMemRelease(handle)
        return fd.value


_PIECE_UNIT = 2 << 20  # the granularity of what is mapped by hand
_P = c.c_void_p
# Called at every request: their arguments may be plain numbers.
_HOT: Dict[str, Tuple[Any, ...]] = {
    "cuPointerGetAttributes": (c.c_uint, _P, _P, c.c_uint64), "cuPointerGetAttribute": (_P, c.c_uint, c.c_uint64),
    "cuEventRecord": (_P, _P),
    "cuStreamWaitEvent": (_P, _P, c.c_uint), "cuStreamWaitValue32_v2": (_P, c.c_uint64, c.c_uint32, c.c_uint),
    "cuStreamIsCapturing": (_P, _P), "cuCtxGetCurrent": (_P,),
    "cuCtxPushCurrent_v2": (_P,), "cuCtxPopCurrent_v2": (_P,),
    "cuLaunchKernel": (_P, *[c.c_uint] * 7, _P, _P, _P)}
_ATTRIBUTE_LIST = (c.c_uint * 6)(*_ATTRIBUTES)


class _Current:
    """Has a GPU's context as the thread's own."""

    __slots__ = ("_library", "_context", "_pushed")

    def __init__(self, library: c.CDLL, context: int) -> None:
        self._library, self._context, self._pushed = library, context, False

    def __enter__(self) -> None:
        now = c.c_void_p()
        if self._library.cuCtxGetCurrent(c.byref(now)) or now.value != self._context:
            status = self._library.cuCtxPushCurrent_v2(self._context)
            if status:
                raise KldError(Status.INTERNAL, f"cuCtxPushCurrent: CUDA error {status}")
            self._pushed = True

    def __exit__(self, *_: Any) -> None:
        if self._pushed:
            self._library.cuCtxPopCurrent_v2(c.byref(c.c_void_p()))


class Gpu:
    """One device and its primary context."""

    def __init__(self, ordinal: int) -> None:
        self.driver, self.ordinal = driver(), ordinal
        device, uuid = c.c_int(), (c.c_ubyte * 16)()
        context = c.c_void_p()
        self.driver.call("cuDeviceGet", c.byref(device), c.c_int(ordinal))
        self.driver.call("cuDeviceGetUuid", uuid, device)
        self.driver.call("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self.uuid = bytes(uuid)
        self.has_waited = False  # for a value: it can
        self._context = int(context.value or 0)
        self._kernels: Dict[str, c.c_void_p] = {}
        self._module = c.c_void_p()

    def current(self) -> _Current:
        return _Current(self.driver.library, self._context)

    # What follows runs inside current(). A stream is a CUstream's number; 0 is the default stream.

    def event(self) -> Tuple[c.c_void_p, bytes]:
        """An event, and the handle by which another process opens it."""
        event, handle = c.c_void_p(), _Handle()
        self.driver.call("cuEventCreate", c.byref(event), c.c_uint(_INTERPROCESS))
        self.driver.call("cuIpcGetEventHandle", c.byref(handle), event)
        return event, bytes(handle.bytes)

    def local_event(self) -> c.c_void_p:
        event = c.c_void_p()
        self.driver.call("cuEventCreate", c.byref(event), c.c_uint(_LOCAL))
        return event

    def open_event(self, handle: bytes) -> c.c_void_p:
        event = c.c_void_p()
        self.driver.call("cuIpcOpenEventHandle", c.byref(event), _Handle.from_buffer_copy(handle))
        return event

    def close_event(self, event: c.c_void_p) -> None:
        self.driver.library.cuEventDestroy_v2(event)

    def record(self, event: c.c_void_p, stream: int) -> None:
        self.driver.call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: c.c_void_p) -> None:
        self.driver.call("cuStreamWaitEvent", stream, event, 0)

    def wait_value(self, stream: int, at: int, number: int) -> None:
        """Until the word at this address of the device has reached the number, as a signed difference."""
        self.driver.call("cuStreamWaitValue32_v2", stream, at, number, 0)

    def try_to_wait(self, at: int) -> c.c_void_p:
        """On a stream made for it, for the word there to be 0, which it is; an event behind that wait. Raises
        where this driver or device cannot, which its symbols do not tell."""
        if not hasattr(self.driver.library, "cuStreamWaitValue32_v2"):
            raise KldUnsupportedError(Status.UNIMPLEMENTED, "this driver has no cuStreamWaitValue32()")
        stream, event = c.c_void_p(), self.local_event()
        try:
            self.driver.call("cuStreamCreate", c.byref(stream), c.c_uint(_NON_BLOCKING))
            self.wait_value(stream.value or 0, at, 0)
            self.record(event, stream.value or 0)
        except KldError as error:
            self.driver.library.cuStreamSynchronize(stream)
            self.close_event(event)
            raise KldUnsupportedError(Status.UNIMPLEMENTED, f"streams here cannot wait for values: {error}") from None
        finally:
            if stream:
                self.driver.library.cuStreamDestroy_v2(stream)
        self.has_waited = True
        return event

    def pin_host(self, address: int, size: int) -> None:
        """Memory of the host, for the device to see."""
        self.driver.call("cuMemHostRegister_v2", c.c_void_p(address), c.c_size_t(size), c.c_uint(_PINNED))

    def address_of_host(self, address: int) -> int:
        """On the device."""
        at = c.c_uint64()
        self.driver.call("cuMemHostGetDevicePointer_v2", c.byref(at), c.c_void_p(address), c.c_uint(0))
        return int(at.value)

    def unpin_host(self, address: int) -> None:
        """When nothing on the device waits for it. Raises where it may be pinned yet."""
        status = self.driver.library.cuMemHostUnregister(c.c_void_p(address))
        if status not in _UNPINNED:
            raise failed("cuMemHostUnregister", status)

    def has_come_to(self, event: c.c_void_p) -> bool:
        """As has_passed(), and raises where nobody can tell."""
        status = self.driver.library.cuEventQuery(event)
        if status not in (0, _NOT_READY):
            raise failed("cuEventQuery", status)
        return bool(status == 0)

    def finish_all(self) -> None:
        status = self.driver.library.cuCtxSynchronize()
        if status not in _ENDED:
            raise failed("cuCtxSynchronize", status)

    def has_passed(self, event: c.c_void_p) -> bool:
        return bool(self.driver.library.cuEventQuery(event) == 0)

    def is_captured(self, stream: int) -> bool:
        """Into a graph."""
        status = c.c_int()
        self.driver.library.cuStreamIsCapturing(stream, c.byref(status))
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

    def scale(self, at: int, dtype: str, count: int, factor: int, factor_dtype: str, stream: int) -> None:
        """Multiplies an array by a number on the device (_ptx.py)."""
        name = _ptx.entry_name(dtype, factor_dtype)
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernel(name)
        arguments = (c.c_uint64 * 3)(at, factor, count)
        first = c.addressof(arguments)
        blocks, threads = _ptx.grid(count, {"float32": 4, "float64": 8}.get(dtype, 2))
        self.driver.call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream,
                         (c.c_void_p * 3)(first, first + 8, first + 16), None)

    def _kernel(self, name: str) -> c.c_void_p:
        if not self._module:
            module = c.c_void_p()
            self.driver.call("cuModuleLoadData", c.byref(module), c.c_char_p(_ptx.source()))
            self._module = module
        kernel = c.c_void_p()
        self.driver.call("cuModuleGetFunction", c.byref(kernel), self._module, c.c_char_p(name.encode()))
        self._kernels[name] = kernel
        return kernel


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
