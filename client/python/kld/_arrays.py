"""NumPy's side: arrays as views and back, on the CPU and, through _interface.py, on a GPU. No lock is needed
but where it says so."""
from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ContextManager, Dict, List, Mapping, Optional, Tuple

import numpy as np

from . import _share
from ._checks import check_no_gradient, no_gradient
from ._errors import KldError, KldMemoryError, KldTypeError, KldUnsupportedError, KldValueError, Status
from ._request import Call, View

if TYPE_CHECKING:
    from ._connection import Connection
    from ._device import Where
    from ._interface import Found

FLOATS = ("float32", "float64", "float16", "bfloat16")
_NAMES: Dict[Any, str] = {np.dtype(name): name for name in FLOATS[:3]}  # native byte order
_SWAPPED = " of the other byte order"


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy has no bfloat16; ml_dtypes has."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise KldTypeError(Status.INVALID, "bfloat16 in NumPy needs the package ml_dtypes") from None
        made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return made
    return np.dtype(name)


def name_of(dtype: Any) -> str:
    """The name of a dtype that kld computes with."""
    try:
        made = dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except TypeError:
        raise KldTypeError(Status.INVALID, f"{dtype!r} is not a dtype; kld takes {', '.join(FLOATS)}") from None
    if made.name not in FLOATS or not made.isnative:
        order = "" if made.isnative else _SWAPPED
        raise KldTypeError(Status.INVALID, f"dtype {made.name}{order}; kld takes {', '.join(FLOATS)} of this "
                           "machine's byte order")
    return str(made.name)


def copy_to(block: Any, array: Any) -> None:
    np.copyto(array_of(block, array.dtype.name, array.shape), array)


def array_of(block: Any, dtype: str, shape: Tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array over the first bytes of a buffer, which it keeps alive."""
    made = dtype_of(dtype)
    size = made.itemsize * math.prod(shape)
    return np.frombuffer(block, np.uint8, size).view(made).reshape(shape)


def _plain(name: str, value: Any) -> Any:
    """A tensor of PyTorch's whose numbers are where it says, or whatever else it is; others are refused."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    from . import _autograd, _surroundings
    check_no_gradient(name, value)
    if _surroundings.transforms():
        raise KldUnsupportedError(Status.UNIMPLEMENTED, _surroundings.TRANSFORMED)
    _surroundings.refuse_special(value)
    _autograd.check_device(name, value)
    return value.detach().resolve_conj().resolve_neg()  # (complex ones are refused by their dtype)


def _refuse_masked(name: str, value: Any) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise KldValueError(Status.INVALID, f"{name} is a masked array; give the mask of rows as row_mask")


def _as_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """What NumPy makes one of; where it has nothing but DLPack, by that."""
    value = _plain(name, value)
    _refuse_masked(name, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16 and value.is_cpu:  # which PyTorch itself makes no array of
            value = value.view(torch.int16).numpy().view(dtype_of("bfloat16"))
    elif hasattr(value, "__dlpack__") and not any(hasattr(value, f"__array{name}__") for name in
                                                  ("", "_interface", "_struct")) and hasattr(np, "from_dlpack"):
        return np.from_dlpack(value)
    try:
        return np.asarray(value)
    except KldError:
        raise
    except (TypeError, ValueError) as error:  # rows of several lengths, say
        kind = KldTypeError if isinstance(error, TypeError) else KldValueError
        raise kind(Status.INVALID, f"{name} is a {type(value).__name__} that NumPy makes no array of: {error}") from error


def view_of(name: str, value: Any) -> View:
    """predictions or targets: an array, or what NumPy makes one of."""
    array = value if type(value) is np.ndarray else _as_array(name, value)
    dtype = _NAMES.get(array.dtype)
    if dtype is None:
        dtype = array.dtype.name
        if dtype not in FLOATS or not array.dtype.isnative:
            order = "" if array.dtype.isnative else _SWAPPED
            raise KldTypeError(Status.INVALID, f"{name} has dtype {dtype}{order}; kld takes {', '.join(FLOATS)} of "
                               "this machine's byte order")
    return View(array.__array_interface__["data"][0], dtype, array.shape,
                None if array.flags.c_contiguous else array.strides, array, copy_to)


def check_shapes(predictions: Tuple[int, ...], targets: Tuple[int, ...]) -> None:
    if predictions != targets:
        raise KldValueError(Status.INVALID, f"predictions have shape {predictions} and targets {targets}; they "
                            "must be the same, nothing is broadcast")


def vector_of(name: str, value: Any, dtype: str, shapes: Tuple[Tuple[int, ...], ...]) -> View:
    """A small contiguous input of one of the shapes, converted to dtype where it is another float."""
    array = value if type(value) is np.ndarray else _as_array(name, value)
    if name == "row_mask":
        if array.dtype.name not in ("bool", "uint8"):
            raise KldTypeError(Status.INVALID, f"row_mask has dtype {array.dtype.name}; it is bool or uint8, "
                               "and 0 leaves a row out")
        dtype = array.dtype.name
    elif array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise KldTypeError(Status.INVALID, f"{name} has dtype {array.dtype.name}; it holds numbers")
    if array.shape not in shapes:
        raise KldValueError(Status.INVALID, f"{name} has shape {array.shape}; expected "
                            + " or ".join(map(str, dict.fromkeys(shapes))))
    try:
        array = np.require(array, dtype_of(dtype), ["C", "A"])
    except MemoryError:
        raise KldMemoryError(Status.NO_MEMORY, f"no memory for a copy of {name}, {array.size} numbers") from None
    return View(array.__array_interface__["data"][0], dtype, array.shape, array.strides, array)


def _bad_output(slot: str, what: str, read_only: bool, dtype: str, shape: Tuple[int, ...]) -> KldError:
    return KldValueError(Status.INVALID, f"out[{slot!r}] is {'a read-only ' if read_only else ''}{what}; expected a "
                         f"writeable array {dtype}{list(shape)}")


def output_of(slot: str, array: Any, dtype: str, shape: Tuple[int, ...]) -> View:
    """An array of the caller's that a result is written to."""
    if not isinstance(array, np.ndarray):
        raise KldTypeError(Status.INVALID, f"out[{slot!r}] is a NumPy array, not {type(array).__name__}")
    _refuse_masked(f"out[{slot!r}]", array)
    if array.dtype != dtype_of(dtype) or array.shape != shape or not array.flags.writeable:
        raise _bad_output(slot, f"{array.dtype.name}{list(array.shape)}" + ("" if array.dtype.isnative else _SWAPPED),
                          not array.flags.writeable, dtype, shape)
    return View(array.__array_interface__["data"][0], dtype, shape, array.strides, array)


def check_out(out: Any) -> Mapping[str, Any]:
    """The dict of a caller's output arrays."""
    outputs = ("loss", "row_loss", "grad_predictions", "grad_targets")
    if out is None:
        return {}
    if not isinstance(out, Mapping) or not set(out) <= set(outputs):
        raise KldValueError(Status.INVALID, f"out is a dict with keys of {', '.join(outputs)}")
    return out


def _has(value: Any, name: str) -> bool:
    try:
        return hasattr(value, name)
    except Exception:  # _interface.find() knows: PyTorch's property has no bfloat16 and bool, and raises KeyError
        return True


class Sides:
    """The two tensors of a request, wherever each is: an array, one on a GPU, or an attached one."""

    def __init__(self, connection: Connection, predictions: Any, targets: Any,
                 names: Tuple[str, str] = ("predictions", "targets")) -> None:
        self._connection = connection
        self._attached: Dict[str, _share.Attached] = {}
        self._found: List[Found] = []
        self.predictions = self._view(names[0], predictions)
        self.targets = self._view(names[1], targets)

    def _view(self, name: str, value: Any) -> View:
        if isinstance(value, np.ndarray):
            return view_of(name, value)
        if isinstance(value, _share.Attached):
            if name == "array":
                raise KldTypeError(Status.INVALID, f"array is {value!r}, which is published already; expected numbers of "
                                   "this process")
            self._attached[name] = value
            return value.view(self._connection)
        value = _plain(name, value)
        view = self._on_gpu(name, value)
        if view is None:
            return view_of(name, value)
        if view.dtype not in FLOATS:
            raise KldTypeError(Status.INVALID, f"{name} has dtype {view.dtype}; kld takes {', '.join(FLOATS)}")
        return view

    def _on_gpu(self, name: str, value: Any) -> Optional[View]:
        if not _has(value, "__cuda_array_interface__") and not _has(value, "__dlpack_device__"):
            return None
        from . import _interface
        found = _interface.find(name, value)
        if found is None:
            return None
        if self._found and found.view.ordinal != self._found[0].view.ordinal:
            raise KldValueError(Status.INVALID, f"{name} is on GPU {found.view.ordinal} and another tensor on GPU "
                                f"{self._found[0].view.ordinal}; they must be on one")
        self._found.append(found)
        return found.view

    def form(self, name: str, given: Any) -> Any:
        if given is not None:
            return given
        return self._attached[name].form if name in self._attached else "probs"

    def vector(self, name: str, value: Any, dtype: str, shapes: Tuple[Tuple[int, ...], ...]) -> View:
        view = None if isinstance(value, np.ndarray) else self._on_gpu(name, _plain(name, value))
        if view is None:
            return vector_of(name, value, dtype, shapes)
        good = ("bool", "uint8") if name == "row_mask" else (dtype,)
        if view.dtype not in good or view.shape not in shapes or view.strides not in (None, _row_major(view)):
            raise KldValueError(Status.INVALID, f"{name} is {view.dtype}{list(view.shape)} on a GPU; expected a "
                                f"contiguous array of {' or '.join(good)} and of shape "
                                + " or ".join(map(str, dict.fromkeys(shapes))))
        return view

    def output_of(self, slot: str, array: Any, dtype: str, shape: Tuple[int, ...]) -> View:
        if isinstance(array, np.ndarray):
            return output_of(slot, array, dtype, shape)
        if getattr(array, "requires_grad", False):  # a tensor of PyTorch's, whose memory it shows nobody
            raise KldValueError(Status.INVALID, no_gradient(f"out[{slot!r}]"))
        view = self._on_gpu(f"out[{slot!r}]", array)
        if view is None:
            return output_of(slot, array, dtype, shape)
        if view.dtype != dtype or view.shape != shape or self._found[-1].read_only:
            raise _bad_output(slot, f"{view.dtype}{list(view.shape)}", self._found[-1].read_only, dtype, shape)
        return view

    def make(self, call: Call, slot: str, dtype: str, shape: Tuple[int, ...]) -> Any:
        """An output of ours, beside the inputs. Under the connection's lock."""
        if not self._found:
            return array_of(call.make(slot, dtype, shape), dtype, shape)
        from . import _interface
        made = _interface.DeviceArray(self._found[0].view.ordinal or 0, dtype, shape)
        call.fresh_output(slot, made._view)
        return made

    # ---- On a GPU

    def current(self) -> ContextManager[None]:
        if not self._found:
            return nullcontext()
        from . import _cuda
        return _cuda.gpu(self._found[0].view.ordinal or 0).current()

    def where(self) -> Optional[Where]:
        """For a request that is waited for. Under the lock."""
        if not self._found:
            return None
        from . import _cuda, _interface
        from ._device import Where
        devices = self._connection._devices()
        stream = _interface.stream_of(self._found[0], devices.is_local)
        where = Where(_cuda.gpu(self._found[0].view.ordinal or 0), stream, early=False)
        devices.check(where.gpu)
        for stream in {found.stream for found in self._found} - {where.stream}:
            where.gpu.finish(stream)
        return where

    def finish(self) -> None:
        """What writes them has ended. Under the lock."""
        where = self.where()
        if where is not None:
            where.gpu.finish(where.stream)


def _row_major(view: View) -> Tuple[int, ...]:
    return tuple(view.item_bytes * math.prod(view.shape[axis + 1:]) for axis in range(len(view.shape)))
