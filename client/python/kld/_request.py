"""One request: what is asked, where its tensors lie, and the call of kld_run(). NumPy's and PyTorch's
sides both come through here. Runs under the lock of its connection.
"""
from __future__ import annotations

import ctypes as c
import math
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from . import _library
from ._errors import KldError, KldTypeError, KldValueError, Status

if TYPE_CHECKING:
    from ._connection import Connection

# A result smaller than this is plain memory, which libkld copies once: cheaper than a region of its own.
SHARE_BYTES_MIN = 64 << 10


class View(NamedTuple):
    """A strided tensor of this process."""

    address: int
    dtype: str  # a key of _library.DTYPE
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]  # bytes
    keep: Any  # owns the memory
    copy_to: Optional[Callable[[Any, Any], None]] = None  # (buffer, keep): all of it, row-major

    @property
    def item_bytes(self) -> int:
        return _library.ITEM_BYTES[_library.DTYPE[self.dtype]]


class Parameters(NamedTuple):
    """The parameters of proto/op.h; None: not given."""

    divergence: str = "forward_kl"
    reduction: str = "batchmean"
    predictions_form: str = "probs"
    targets_form: str = "probs"
    temperature: Optional[float] = None
    beta: Optional[float] = None
    skew: Optional[float] = None
    weight: Optional[float] = None
    scale: Optional[float] = None
    normalizer: Optional[float] = None
    grad_output: Optional[float] = None


def contiguous_strides(shape: Tuple[int, ...], item_bytes: int) -> Tuple[int, ...]:
    strides = []
    step = item_bytes
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def row_stride(view: View) -> Optional[int]:
    """Bytes from one row to the next, if that says where all rows are; None if the layout is another, or
    not aligned, and the tensor must be copied first. 0: one row."""
    item = view.item_bytes
    if view.address % item or (view.shape[-1] > 1 and view.strides[-1] != item):
        return None
    step = 0  # of the rows so far, going outwards
    rows = 1
    for size, stride in zip(reversed(view.shape[:-1]), reversed(view.strides[:-1])):
        if size == 1:
            continue
        if step == 0:
            step = stride
        elif stride != step * rows:
            return None
        rows *= size
    if rows > 1 and (step < view.shape[-1] * item or step % item):
        return None  # rows that overlap, or run backwards
    return step


def check_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise KldTypeError(Status.INVALID,
                           f"{name} is a number, not {type(value).__name__}") from None


_templates: Dict[Tuple[str, ...], _library.Op] = {}  # at most one for each combination of known names


def op_of(parameters: Parameters, shape: Tuple[int, ...]) -> _library.Op:
    """An op without tensors. libkld knows the names, and says what is wrong with others."""
    if not 1 <= len(shape) <= _library.RANK_MAX:
        raise KldValueError(Status.INVALID, f"{len(shape)} dimensions; kld takes 1 to {_library.RANK_MAX}, the "
                            "last of which holds the classes")
    if 0 in shape:
        raise KldValueError(Status.INVALID, f"dimension {shape.index(0)} of the shape is 0")
    texts = parameters[:4]
    made = _library.Op()
    template = _templates.get(texts)
    if template is None:
        _library.library().kld_op_init(c.byref(made))
        for name, text in zip(Parameters._fields, texts):
            if not isinstance(text, str):
                raise KldTypeError(Status.INVALID, f"{name} is a text, not {type(text).__name__}")
            _library.call("kld_op_set_text", c.byref(made), name.encode(), text.encode())
        template = _library.Op.from_buffer_copy(made)
        _templates[texts] = template
    c.memmove(c.byref(made), c.byref(template), c.sizeof(made))
    for name, value in zip(Parameters._fields[4:], parameters[4:]):
        if value is not None:
            _library.call("kld_op_set_number", c.byref(made), name.encode(), check_number(name, value))
    made.rank = len(shape)
    for index, size in enumerate(shape):
        made.shape[index] = size
    return made


def timeout_ns(timeout: Optional[float]) -> int:
    if timeout is None:
        return 0
    seconds = check_number("timeout", timeout)
    if not 0 < seconds < 1e9:
        raise KldValueError(Status.INVALID, f"timeout is a number of seconds above 0, not {timeout}")
    return max(1, math.ceil(seconds * 1e9))


class Call:
    """A request in the making: tensors are placed, then it runs."""

    def __init__(self, connection: Connection, parameters: Parameters, shape: Tuple[int, ...],
                 timeout: Optional[float]) -> None:
        self.connection = connection
        self.request = _library.Request(op=op_of(parameters, shape), timeout_ns=timeout_ns(timeout))
        self.result = _library.Result()
        self._keep: List[Any] = []
        self._written: List[Any] = []  # spans of outputs
        self.copied_bytes = 0

    def input(self, slot: str, view: View) -> View:
        """Places an input, copied into shared memory first if its layout cannot be named."""
        stride = row_stride(view)
        if stride is None:
            view = self._gathered(view)
            stride = 0
        self._place(slot, view, stride)
        return view

    def vector(self, slot: str, view: View) -> None:
        """Places an input of one value a row (or of the loss's shape); contiguous."""
        self._place(slot, view, 0)

    def output(self, slot: str, view: View) -> None:
        """Places an output of the caller's, whose layout must be one of rows."""
        stride = row_stride(view)
        if stride is None:
            raise KldValueError(Status.INVALID, f"out[{slot!r}]: the classes of a row must be contiguous, rows "
                                "at one distance of at least a row, and the memory aligned")
        span = self._place(slot, view, stride)
        if span:
            self._written.append(span)

    def make(self, slot: str, dtype: str, shape: Tuple[int, ...]) -> Any:
        """Places an output in memory of ours, in shared memory where that is worth it; returns the
        buffer, which is at least as long."""
        item = _library.ITEM_BYTES[_library.DTYPE[dtype]]
        size = item * math.prod(shape)
        block = self._memory(size)
        view = View(c.addressof(block), dtype, shape, contiguous_strides(shape, item), block)
        span = self._place(slot, view, 0)
        if span:
            self._written.append(span)
        return block

    def _memory(self, size: int) -> Any:
        if size >= SHARE_BYTES_MIN and not self.connection._memory.is_full:
            return self.connection._memory.take(size, self.connection._tidy)
        return (c.c_char * max(size, 1))()

    def _gathered(self, view: View) -> View:
        """A copy in shared memory, which libkld need not copy again."""
        size = view.item_bytes * math.prod(view.shape)
        block = self.connection._memory.take(size, self.connection._tidy)
        assert view.copy_to is not None
        view.copy_to(block, view.keep)
        self.copied_bytes += size
        return View(c.addressof(block), view.dtype, view.shape,
                    contiguous_strides(view.shape, view.item_bytes), block)

    def _place(self, slot: str, view: View, stride: int) -> Any:
        number = _library.SLOT[slot]
        tensor, at = self.request.op.tensor[number], self.request.bytes[number]
        tensor.dtype = _library.DTYPE[view.dtype]
        tensor.row_stride_bytes = stride
        rows = math.prod(view.shape[:-1]) if view.shape else 1
        row_bytes = view.item_bytes * (view.shape[-1] if view.shape else 1)
        size = (rows - 1) * (stride or row_bytes) + row_bytes
        self._keep.append(view)
        span = self.connection._memory.find(view.address, size)
        if span is not None and span.region:
            at.region, at.offset_bytes = span.region, view.address - span.address
            return span
        at.data = view.address
        if self.connection._memory.shared:
            self.copied_bytes += rows * row_bytes  # libkld copies it through shared memory
        return None

    def run(self) -> _library.Result:
        try:
            _library.call("kld_run", self.connection._handle, c.byref(self.request), c.byref(self.result))
        except KldError:
            for span in self._written:  # it may be written until a later request has ended
                span.spoiled = True
            raise
        self.connection._copied_bytes += self.copied_bytes
        return self.result
