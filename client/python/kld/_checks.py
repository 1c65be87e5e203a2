"""Checks of what callers give: numbers, shapes, tensors that get no gradient. No lock."""
from __future__ import annotations

import operator
import sys
from typing import Any, Tuple

import numpy as np

from . import _library
from ._errors import KldTypeError, KldValueError, Status


def check_no_gradient(name: str, value: Any) -> None:
    """A tensor of PyTorch that would wait for its gradient in vain."""
    if getattr(value, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise KldValueError(Status.INVALID, no_gradient(name))


def no_gradient(name: str) -> str:
    return f"{name} requires grad, and kld gives it none here; expected a tensor without: detach() it"


def check_number(name: str, value: Any) -> float:
    check_no_gradient(name, value)
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise KldTypeError(Status.INVALID,
                           f"{name} is a number, not {type(value).__name__}") from None


def check_shape(shape: Tuple[int, ...]) -> None:
    if not 1 <= len(shape) <= _library.RANK_MAX:
        raise KldValueError(Status.INVALID, f"{len(shape)} dimensions; kld takes 1 to {_library.RANK_MAX}, the "
                            "last of which holds the classes")
    if 0 in shape:
        raise KldValueError(Status.INVALID, f"dimension {shape.index(0)} of the shape is 0")


def sizes_of(shape: Any) -> Tuple[int, ...]:
    """The shape of an array to be made: a number, or numbers."""
    try:
        sizes = (operator.index(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(operator.index, shape))
    except TypeError:
        raise KldTypeError(Status.INVALID, f"a shape is a whole number or several, not {shape!r}") from None
    if any(size < 1 for size in sizes):
        raise KldValueError(Status.INVALID, f"shape {sizes}; each dimension is at least 1")
    return sizes


__all__ = ["check_no_gradient", "check_number", "check_shape", "no_gradient", "sizes_of"]
