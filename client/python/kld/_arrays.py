"""NumPy's side: arrays as views and back. No lock is needed here."""
from __future__ import annotations

import math
from typing import Any, Dict, Tuple

import numpy as np

from ._errors import KldTypeError, KldValueError, Status
from ._request import View

FLOATS = ("float32", "float64", "float16", "bfloat16")


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy has no bfloat16; ml_dtypes has."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise KldTypeError(Status.INVALID, "bfloat16 in NumPy needs the package ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def name_of(dtype: Any) -> str:
    """The name of a dtype that kld computes with."""
    try:
        made = dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except TypeError:
        raise KldTypeError(Status.INVALID, f"{dtype!r} is not a dtype; kld takes {', '.join(FLOATS)}") from None
    if made.name not in FLOATS or not made.isnative:
        order = "" if made.isnative else " of the other byte order"
        raise KldTypeError(Status.INVALID, f"dtype {made.name}{order}; kld takes {', '.join(FLOATS)} of this "
                           "machine's byte order")
    return made.name


def copy_to(block: Any, array: Any) -> None:
    np.copyto(array_of(block, array.dtype.name, array.shape), array)


def array_of(block: Any, dtype: str, shape: Tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array over the first bytes of a buffer, which it keeps alive."""
    made = dtype_of(dtype)
    size = made.itemsize * math.prod(shape)
    return np.frombuffer(block, np.uint8, size).view(made).reshape(shape)


def view_of(name: str, value: Any) -> View:
    """predictions or targets: an array, or what NumPy makes one of."""
    array = np.asarray(value)
    if array.dtype.name not in FLOATS or not array.dtype.isnative:
        order = "" if array.dtype.isnative else " of the other byte order"
        raise KldTypeError(Status.INVALID, f"{name} has dtype {array.dtype.name}{order}; kld takes "
                           f"{', '.join(FLOATS)} of this machine's byte order")
    return View(array.__array_interface__["data"][0], array.dtype.name, array.shape, array.strides, array,
                copy_to)


def check_shapes(predictions: Tuple[int, ...], targets: Tuple[int, ...]) -> None:
    if predictions != targets:
        raise KldValueError(Status.INVALID, f"predictions have shape {predictions} and targets {targets}; they "
                            "must be the same, nothing is broadcast")


def vector_of(name: str, value: Any, dtype: str, shapes: Tuple[Tuple[int, ...], ...]) -> View:
    """A small contiguous input of one of the shapes, converted to dtype where it is another float."""
    array = np.asarray(value)
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
    array = np.require(array, dtype_of(dtype), ["C", "A"])
    return View(array.__array_interface__["data"][0], dtype, array.shape, array.strides, array)


def output_of(slot: str, array: Any, dtype: str, shape: Tuple[int, ...]) -> View:
    """An array of the caller's that a result is written to."""
    if not isinstance(array, np.ndarray):
        raise KldTypeError(Status.INVALID, f"out[{slot!r}] is a NumPy array, not {type(array).__name__}")
    if array.dtype != dtype_of(dtype) or array.shape != shape or not array.flags.writeable:
        raise KldValueError(Status.INVALID, f"out[{slot!r}] is {array.dtype.name}{list(array.shape)}; expected a "
                            f"writeable array {dtype}{list(shape)}")
    return View(array.__array_interface__["data"][0], dtype, shape, array.strides, array)


def check_out(out: Any) -> Dict[str, Any]:
    """The dict of a caller's output arrays."""
    outputs = ("loss", "row_loss", "grad_predictions", "grad_targets")
    if out is None:
        return {}
    if not isinstance(out, dict) or not set(out) <= set(outputs):
        raise KldValueError(Status.INVALID, f"out is a dict with keys of {', '.join(outputs)}")
    return out
