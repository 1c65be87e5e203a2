"""Arrays of other libraries on a GPU (CuPy, JAX, Numba, PyTorch), by __cuda_array_interface__ or DLPack: read
and written where they lie, no library imported. Results are DeviceArray, which speaks both. No lock is needed.
"""
from __future__ import annotations

import atexit
import ctypes as c
import math
import sys
import weakref
from typing import Any, Dict, NamedTuple, Optional, Tuple

import numpy as np

from . import _cuda, _library
from ._checks import check_shape
from ._errors import KldTypeError, KldValueError, Status
from ._request import View

_KDL_CUDA = 2
_TYPESTR: Dict[str, str] = {"<f4": "float32", "<f8": "float64", "<f2": "float16", "|u1": "uint8", "|b1": "bool"}
# DLDataType: code (1 unsigned, 2 float, 4 bfloat, 6 bool), bits
_DL_TYPES: Dict[Tuple[int, int], str] = {(2, 32): "float32", (2, 64): "float64", (2, 16): "float16",
                                         (4, 16): "bfloat16", (1, 8): "uint8", (6, 8): "bool"}
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY, also DLPack's number of it
_STREAM_PER_THREAD = 2  # CU_STREAM_PER_THREAD: in each thread its own


class _DlTensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device", c.c_int32), ("ndim", c.c_int32),
                ("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16),
                ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]


class _DlManaged(c.Structure):
    pass


_Deleter = c.CFUNCTYPE(None, c.POINTER(_DlManaged))
_DlManaged._fields_ = [("tensor", _DlTensor), ("context", c.c_void_p), ("deleter", _Deleter)]

_new_capsule = c.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = c.py_object, [c.c_void_p, c.c_char_p, c.c_void_p]
_capsule_pointer = c.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = c.c_void_p, [c.py_object, c.c_char_p]


class Found(NamedTuple):
    view: View
    stream: int  #: the work that fills it was enqueued there
    read_only: bool = False


def find(name: str, value: Any) -> Optional[Found]:
    """None: not an array on a GPU."""
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
    except Exception:  # one that this library does not put so: bfloat16, say, or on the CPU
        interface = None
    device = getattr(value, "__dlpack_device__", None)
    has_dlpack = device is not None and device()[0] == _KDL_CUDA
    # Before version 3 the interface says nothing of the stream that fills the array (PyTorch's is 2); DLPack
    # orders it. And it has bfloat16, too.
    if isinstance(interface, dict) and (not has_dlpack or "stream" in interface and interface["typestr"] in _TYPESTR):
        return _of_interface(name, value, interface)
    return _of_dlpack(name, value) if has_dlpack else None


def _of_interface(name: str, value: Any, interface: Dict[str, Any]) -> Found:
    dtype = _TYPESTR.get(interface["typestr"])
    if dtype is None:
        raise KldTypeError(Status.INVALID, f"{name} holds {interface['typestr']!r}; kld takes "
                           + ", ".join(sorted(set(_DL_TYPES.values()))))
    if interface.get("mask") is not None:
        raise KldValueError(Status.INVALID, f"{name} is a masked array; give the mask of rows as row_mask")
    address, shape = int(interface["data"][0]), tuple(int(size) for size in interface["shape"])
    if 0 in shape:  # has no address
        check_shape(shape)
    strides = interface.get("strides")
    allocation = _cuda.driver().look_up(address)
    if allocation is None:
        raise KldValueError(Status.INVALID, f"{name} is not in the memory of a GPU")
    view = View(address, dtype, shape, None if strides is None else tuple(strides), value,
                ordinal=allocation.ordinal)
    return Found(view, int(interface.get("stream") or _LEGACY_STREAM), bool(interface["data"][1]))


def _capsule_of(value: Any) -> Any:
    try:
        return value.__dlpack__(stream=_LEGACY_STREAM)  # what fills it comes before that stream's next work
    except RuntimeError:
        torch = sys.modules.get("torch")
        if torch is None or getattr(value, "dtype", None) is not torch.bool:
            raise
        return _capsule_of(value.view(torch.uint8))  # a PyTorch whose DLPack has no bool (1.13); its bytes are 0 and 1


def _of_dlpack(name: str, value: Any) -> Found:
    capsule = _capsule_of(value)
    tensor = c.cast(_capsule_pointer(capsule, b"dltensor"), c.POINTER(_DlManaged)).contents.tensor
    dtype = _DL_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise KldTypeError(Status.INVALID, f"{name} holds DLPack's type {tensor.code} of {tensor.bits} bits; kld "
                           f"takes {', '.join(sorted(set(_DL_TYPES.values())))}")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if 0 in shape:  # likewise
        check_shape(shape)
    strides = None
    if tensor.strides:
        strides = tuple(tensor.strides[axis] * (tensor.bits // 8) for axis in range(tensor.ndim))
        row_major = (math.prod(shape[axis + 1:]) * (tensor.bits // 8) for axis in range(tensor.ndim))
        if all(one == other or size == 1 for one, other, size in zip(strides, row_major, shape)):
            strides = None  # (that of a dimension of 1 may be anything)
    # The capsule, never taken over, gives the array back when it goes.
    view = View(tensor.data + tensor.byte_offset, dtype, shape, strides, capsule, ordinal=tensor.device)
    return Found(view, _LEGACY_STREAM)


def stream_of(found: Found, is_local: bool) -> int:
    """That requests can run on. Over local: another thread may enqueue them, for which the calling thread's default
    stream is none: what fills the array there is waited for before."""
    return _LEGACY_STREAM if is_local and found.stream == _STREAM_PER_THREAD else found.stream


class DeviceArray:
    """An array on a GPU that a request wrote: __cuda_array_interface__ and DLPack, so that cupy.asarray(),
    torch.as_tensor() and jax.dlpack.from_dlpack() take it without a copy; `numpy()` copies it to the CPU."""

    def __init__(self, ordinal: int, dtype: str, shape: Tuple[int, ...]) -> None:
        self.ordinal, self.shape, self._dtype = ordinal, shape, dtype
        self.nbytes = _library.ITEM_BYTES[_library.DTYPE[dtype]] * math.prod(shape)
        gpu = _cuda.gpu(ordinal)
        with gpu.current():
            self._address = gpu.allocate(max(self.nbytes, 1))
        weakref.finalize(self, _free, gpu, self._address).atexit = False

    @property
    def dtype(self) -> np.dtype[Any]:
        from ._arrays import dtype_of
        return dtype_of(self._dtype)

    @property
    def _view(self) -> View:
        return View(self._address, self._dtype, self.shape, None, self, ordinal=self.ordinal)

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        for typestr, dtype in _TYPESTR.items():
            if dtype == self._dtype:
                return {"shape": self.shape, "typestr": typestr, "data": (self._address, False), "strides": None,
                        "version": 3, "stream": None}
        raise AttributeError(f"__cuda_array_interface__ has no {self._dtype}; DLPack does")

    def __dlpack_device__(self) -> Tuple[int, int]:
        return _KDL_CUDA, self.ordinal

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None,
                   dl_device: Optional[Tuple[int, int]] = None, copy: Optional[bool] = None) -> Any:
        """What wrote it has ended, so any stream may read it. It is lent, there where it lies, or not at all."""
        if copy:
            raise BufferError(f"{self!r} is lent without a copy; expected copy=False or None")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"{self!r} is lent on its GPU, DLPack's device {self.__dlpack_device__()}, not on "
                              f"{tuple(dl_device)}; `numpy()` copies it to the CPU")
        rank = len(self.shape)
        shape = (c.c_int64 * max(rank, 1))(*self.shape)
        strides = (c.c_int64 * max(rank, 1))(*(math.prod(self.shape[axis + 1:]) for axis in range(rank)))
        code, bits = next(key for key, name in _DL_TYPES.items() if name == self._dtype)
        managed = _DlManaged(tensor=_DlTensor(self._address, _KDL_CUDA, self.ordinal, rank, code, bits, 1, shape,
                                              strides, 0), context=None, deleter=_deleter)
        address = c.addressof(managed)
        _lent[address] = managed, shape, strides, self
        return _new_capsule(address, b"dltensor", c.cast(_capsule_end, c.c_void_p))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __array__(self, *_: Any, **more: Any) -> Any:
        """NumPy would make an object array of one of it, without a word."""
        raise KldTypeError(Status.INVALID, f"{self!r} is no array of NumPy's; `numpy()` copies it to the CPU")

    def numpy(self) -> np.ndarray[Any, Any]:
        made = np.empty(self.shape, self.dtype)
        gpu = _cuda.gpu(self.ordinal)
        with gpu.current():
            gpu.driver.call("cuMemcpyDtoH_v2", c.c_void_p(made.ctypes.data), c.c_uint64(self._address),
                            c.c_size_t(self.nbytes))
        return made

    def __repr__(self) -> str:
        return f"<kld.DeviceArray {self._dtype}{list(self.shape)} on GPU {self.ordinal}>"


def _free(gpu: _cuda.Gpu, address: int) -> None:
    with gpu.current():
        gpu.free(address)


_lent: Dict[int, Any] = {}  # what capsules hold, until their deleter


def _take_back(managed: Any) -> None:
    _lent.pop(c.addressof(managed.contents), None)


def _end_capsule(capsule: Any) -> None:
    """A capsule that nobody took over (it would be called "used_dltensor")."""
    is_valid = c.pythonapi.PyCapsule_IsValid
    is_valid.argtypes, pointer = [c.c_void_p, c.c_char_p], c.pythonapi["PyCapsule_GetPointer"]
    pointer.argtypes, pointer.restype = [c.c_void_p, c.c_char_p], c.c_void_p
    if is_valid(capsule, b"dltensor"):
        _lent.pop(pointer(capsule, b"dltensor"), None)


def _at_exit() -> None:
    """Who still has one of ours lets go of it when there is no interpreter any more: by a function that does
    nothing, of memory that stays."""
    nothing = c.cast(c.CDLL(None).getpid, _Deleter)
    for lent in _lent.values():
        lent[0].deleter = nothing
        c.pythonapi.Py_IncRef(c.py_object((lent, nothing)))


atexit.register(_at_exit)
_deleter = _Deleter(_take_back)
_capsule_end = c.PYFUNCTYPE(None, c.c_void_p)(_end_capsule)
