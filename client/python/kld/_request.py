"""One request: what is asked, where its tensors lie, and the call of kld_run_slice(). NumPy's and PyTorch's
sides both come through here. Runs under the lock of its connection.

What a request says apart from addresses is a `Plan`, kept for the next request like it: training asks the
same thing at every step.
"""
from __future__ import annotations

import ctypes as c
import math
import threading
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, SupportsFloat, Tuple

from . import _library
from ._checks import check_number, check_shape
from ._errors import (KldConnectionError, KldError, KldLookupError, KldMemoryError, KldTimeoutError, KldTypeError,
                      KldValueError, Status, from_status)
from ._memory import plain

if TYPE_CHECKING:
    from ._connection import Connection
    from ._device import Where

# A result smaller than this is plain memory, which libkld copies once: cheaper than a region of its own.
SHARE_BYTES_MIN = 64 << 10
PLANS_MAX = 64
SLICE_MS = 100  # Ctrl-C is noticed within this, where no signal wakes the wait
LATE_SECONDS = 5.0  # so long the end of a request that was given up is waited for
exiting = threading.Event()  # the interpreter ends: no daemon thread is to wait on


class View(NamedTuple):
    """A strided tensor of this process, or one of another that is attached."""

    address: int
    dtype: str  # a key of _library.DTYPE
    shape: Tuple[int, ...]
    strides: Optional[Tuple[int, ...]]  # bytes; None: row-major
    keep: Any  # owns the memory
    copy_to: Optional[Callable[[Any, Any], None]] = None  # (buffer, keep): all of it, row-major
    ordinal: Optional[int] = None  # of its GPU; None: host memory
    region: Optional[c.c_void_p] = None  # attached: this, from its start

    @property
    def item_bytes(self) -> int:
        return _library.ITEM_BYTES[_library.DTYPE[self.dtype]]


class Parameters(NamedTuple):
    """The parameters of proto/op.h; None: not given."""

    divergence: str = "forward_kl"
    reduction: str = "batchmean"
    predictions_form: str = "probs"
    targets_form: str = "probs"
    temperature: Optional[SupportsFloat] = None
    beta: Optional[SupportsFloat] = None
    skew: Optional[SupportsFloat] = None
    weight: Optional[SupportsFloat] = None
    scale: Optional[SupportsFloat] = None
    normalizer: Optional[SupportsFloat] = None
    grad_output: Optional[SupportsFloat] = None


NUMBERS = Parameters._fields[4:]


def row_stride(view: View) -> Optional[int]:
    """Bytes from one row to the next, if that says where all rows are; None if the layout is another, or
    not aligned, and the tensor must be copied first. 0: rows follow each other."""
    item = view.item_bytes
    if view.address % item:
        return None
    if view.strides is None:
        return 0
    if view.shape[-1] > 1 and view.strides[-1] != item:
        return None
    step = 0  # of the rows so far, going outwards
    rows = 1
    for size, stride in zip(reversed(view.shape[:-1]), reversed(view.strides[:-1])):
        if size == 1:
            continue
        if stride == 0:
            return None  # one row for all of these (expand(), broadcast_to())
        if rows == 1:
            step = stride
        elif stride != step * rows:
            return None
        rows *= size
    if rows > 1 and (step < view.shape[-1] * item or step % item):
        return None  # rows that overlap, or run backwards
    return step if rows > 1 else 0


def _fill_op(made: _library.Op, parameters: Parameters, shape: Tuple[int, ...]) -> None:
    """An op without tensors. libkld knows the names, and says what is wrong with others."""
    _library.library().kld_op_init(c.byref(made))
    for name, text in zip(Parameters._fields[:4], parameters[:4]):
        if not isinstance(text, str):
            raise KldTypeError(Status.INVALID, f"{name} is a text, not {type(text).__name__}")
        _library.call("kld_op_set_text", c.byref(made), name.encode(), _library.text(name, text))
    for name, value in zip(Parameters._fields[4:], parameters[4:]):
        if value is not None:
            _library.call("kld_op_set_number", c.byref(made), name.encode(), check_number(name, value))
    made.rank = len(shape)
    for index, size in enumerate(shape):
        made.shape[index] = size


def timeout_ns(timeout: Optional[float]) -> int:
    """0: no limit."""
    if timeout is None:
        return 0
    seconds = check_number("timeout", timeout)
    if seconds == math.inf:
        return 0
    if not 0 < seconds < 1e9:
        raise KldValueError(Status.INVALID, f"timeout is a number of seconds above 0, below 1e9, or inf, not {timeout}")
    return max(1, math.ceil(seconds * 1e9))


Layout = Tuple[Tuple[int, int, int], ...]  # of each tensor: slot, dtype, stride of its rows
Extents = Tuple[Tuple[int, int], ...]  # and: bytes from its first to its last, bytes of an element


class Plan:
    """A request but for the addresses of its tensors, which each use writes anew."""

    __slots__ = ("request", "reference", "places", "extents", "timeout_ns")

    def __init__(self, parameters: Parameters, shape: Tuple[int, ...], timeout: Optional[float],
                 layout: Layout, extents: Extents) -> None:
        self.request = _library.Request()
        self.extents = extents
        self.timeout_ns = timeout_ns(timeout)
        _fill_op(self.request.op, parameters, shape)
        for slot, dtype, stride in layout:
            tensor = self.request.op.tensor[slot]
            tensor.dtype, tensor.row_stride_bytes = dtype, stride
        self.reference = c.byref(self.request)
        self.places = [self.request.bytes[slot] for slot, _, _ in layout]

    def begin(self, connection: Connection) -> None:
        if self.timeout_ns:
            self.request.timeout_ns = self.timeout_ns - connection._waited_ns


# Outcomes of a request that no device ever saw.
_NOT_STARTED = {Status.INVALID, Status.TOO_LARGE, Status.UNIMPLEMENTED, Status.BUSY, Status.FORBIDDEN,
                Status.NOT_FOUND, Status.THROTTLED, Status.UNAUTHENTICATED}
_PLAIN_NUMBERS = (float, int, type(None))


class Call:
    """A request in the making: tensors are placed, then it runs. With `where`, those on a GPU too."""

    __slots__ = ("connection", "where", "in_place", "copied_bytes", "bounced", "request", "result", "_parameters", "_shape",
                 "_timeout", "_layout", "_extents", "_at", "_keep", "_written", "_shared_out", "_reference", "plan",
                 "_meanwhile")

    def __init__(self, connection: Connection, parameters: Parameters, shape: Tuple[int, ...],
                 timeout: Optional[float], where: Optional[Where] = None) -> None:
        check_shape(shape)
        self.connection, self.where = connection, where
        self._parameters, self._shape, self._timeout = parameters, shape, timeout
        self._layout: List[Tuple[int, int, int]] = []
        self._extents: List[Tuple[int, int]] = []
        self._at: List[Tuple[Any, Optional[int]]] = []  # of each tensor: region, offset; or None, address
        self._keep: List[Any] = []
        self._written: List[Any] = []  # spans of outputs
        self.bounced: List[Tuple[str, View, int]] = []  # _device.py
        self.in_place = False  # an output may lie over an input
        self._shared_out = False  # the server writes to memory of the caller's
        self.copied_bytes = 0
        self.result = connection._result
        self._meanwhile: Optional[Callable[[], None]] = None

    def input(self, slot: str, view: View) -> None:
        """Places an input, copied into shared memory first if its layout cannot be named."""
        stride = row_stride(view)
        if stride is None:
            view = self._gathered(slot, view)
            stride = 0
        self._place(slot, view, stride)

    def vector(self, slot: str, view: View) -> None:
        """Places an input of one value a row (or of the loss's shape); contiguous."""
        self._place(slot, view, 0)

    def output(self, slot: str, view: View) -> None:
        """Places an output of the caller's, whose layout must be one of rows."""
        if slot == "row_loss" or slot == "loss" and self._parameters.reduction == "row":  # rows of one number
            view = view._replace(shape=(*view.shape, 1),
                                 strides=None if view.strides is None else (*view.strides, view.item_bytes))
        stride = row_stride(view)
        if stride is None:
            raise KldValueError(Status.INVALID, f"out[{slot!r}]: the classes of a row must be contiguous, rows "
                                "at one distance of at least a row, and the memory aligned")
        self.in_place = True
        self.fresh_output(slot, view, stride)
        self._shared_out = self._shared_out or self._at[-1][0] is not None

    def fresh_output(self, slot: str, view: View, stride: int = 0) -> None:
        """An output in memory that nothing else uses."""
        span = self._place(slot, view, stride)
        if span:
            self._written.append(span)

    def make(self, slot: str, dtype: str, shape: Tuple[int, ...]) -> Any:
        """Places an output in memory of ours, in shared memory where that is worth it; returns the
        buffer, which is at least as long."""
        size = _library.ITEM_BYTES[_library.DTYPE[dtype]] * math.prod(shape)
        block = self._room(slot, size) if size >= SHARE_BYTES_MIN else (c.c_char * max(size, 1))()
        self.fresh_output(slot, View(c.addressof(block), dtype, shape, None, block))
        return block

    def _room(self, slot: str, size: int) -> Any:
        """Shared memory, or ordinary memory where the server or this process lets us have no more of it."""
        memory = self.connection._memory
        if not memory.is_full:
            try:
                return memory.take(size, self.connection._tidy)
            except KldMemoryError:
                pass
        return plain(slot, size)

    def _gathered(self, slot: str, view: View) -> View:
        """A copy in shared memory, which libkld need not copy again."""
        if view.copy_to is None:
            raise KldValueError(Status.INVALID, f"{slot}: the classes of a row must be contiguous, rows at one "
                                "distance of at least a row, and the memory aligned")
        size = view.item_bytes * math.prod(view.shape)
        block = self._room(slot, size)
        view.copy_to(block, view.keep)
        self.copied_bytes += size
        return View(c.addressof(block), view.dtype, view.shape, None, block)

    def _place(self, slot: str, view: View, stride: int) -> Any:
        number, dtype = _library.SLOT[slot], _library.DTYPE[view.dtype]
        shape, item = view.shape, _library.ITEM_BYTES[dtype]
        row_bytes = item * (shape[-1] if shape else 1)
        rows = math.prod(shape[:-1])
        size = (rows - 1) * (stride or row_bytes) + row_bytes
        self._layout.append((number, dtype, stride))
        self._extents.append((size, item))
        self._keep.append(view)
        connection = self.connection
        if view.region is not None:
            view.keep.check_open()  # under the lock, which close() takes, too
            self._at.append((view.region, 0))
            return None
        if view.ordinal is not None:
            self._at.append(connection._devices().place(self, slot, view, size))
            return None
        span = connection._memory.find(view.address, size)
        if span is not None and span.region:
            self._at.append((span.region, view.address - span.address))
            return span
        self._at.append((None, view.address))
        if connection._memory.shared:
            self.copied_bytes += rows * row_bytes  # libkld copies it through shared memory
        return None

    def has_gaps(self, slot: str) -> bool:
        """Between the rows of a tensor that was placed."""
        number = _library.SLOT[slot]
        return any(stride for at, _, stride in self._layout if at == number)

    @property
    def is_plain(self) -> bool:
        """What it asks for can be told from another by comparing."""
        return all(type(value) in _PLAIN_NUMBERS for value in (*self._parameters[4:], self._timeout))

    def _plan(self) -> Plan:
        layout = tuple(self._layout)
        if not self.is_plain:
            return self._new_plan(layout)
        plans: Dict[Any, Plan] = self.connection._plans
        # _device.py writes to the request of one on a GPU (early, the stream, events): it is no other's.
        key = self._parameters, self._shape, self._timeout, layout, self.where is None
        try:
            plan = plans.get(key)
        except TypeError:  # what is no text where one belongs
            return self._new_plan(layout)
        if plan is None:
            plan = self._new_plan(layout)
            if len(plans) >= PLANS_MAX:
                plans.clear()
            plans[key] = plan
        return plan

    def _new_plan(self, layout: Layout) -> Plan:
        return Plan(self._parameters, self._shape, self._timeout, layout, tuple(self._extents))

    def again(self, plan: Plan, tensors: Sequence[Any]) -> bool:
        """Runs a plan that a request of the same kind made, on dense tensors on a GPU, in the plan's order.
        False: they cannot be named."""
        devices = self.connection._devices()
        for tensor, (size, _) in zip(tensors, plan.extents):
            address = tensor.data_ptr()
            found = (None, address) if devices.is_local else devices.region_of(address, size)
            if found is None:
                return False
            self._at.append(found)
        self._keep.append(tensors)
        self.run(plan)
        return True

    def run(self, plan: Optional[Plan] = None) -> _library.Result:
        plan = self.plan = self._plan() if plan is None else plan
        for place, (region, at) in zip(plan.places, self._at):
            if region is None:
                place.data, place.region, place.offset_bytes = at, None, 0
            else:
                place.data, place.region, place.offset_bytes = None, region, at
        # Whatever is raised, memory may be written until a later request has ended: none of it is used again.
        for span in self._written:
            span.spoiled = True
        try:
            self.go(plan)
        except KldError as error:
            if error.is_unseen and self.where is None:
                for span in self._written:
                    span.spoiled = False
            raise self._in_names(error)
        for span in self._written:
            span.spoiled = False
        self.connection._copied_bytes += self.copied_bytes
        return self.result

    def go(self, plan: Plan) -> None:
        """Sends the plan's request, which says where its tensors are, and waits for the answer."""
        self.request, self._reference = plan.request, plan.reference
        plan.begin(self.connection)
        if self.where is None:
            self.submit()
            return
        limbo = self._limbo()
        before = len(limbo)
        try:
            self.connection._devices().run(self, self.where)
        except KldError as error:
            if error.status in _NOT_STARTED:
                del limbo[before:]
            raise
        limbo.clear()  # requests of a stream end in their order: nothing earlier writes any more

    def _limbo(self) -> List[Any]:
        """Of the request's stream."""
        assert self.where is not None
        return self.connection._limbo.setdefault((self.where.gpu.ordinal, self.where.stream), [])

    def submit(self) -> None:
        if self.where is not None:
            self._limbo().append(self._keep)  # from now on the server may write to them
        try:
            submit(self.connection, self._reference, self, self.in_place, self._meanwhile)
        except BaseException as error:
            if self.in_place and self._shared_out:
                self._outlast(error)
            raise

    def _in_names(self, error: KldError) -> KldError:
        """The same, of an attached tensor in the words that its user has for it."""
        if error.status != Status.GONE:
            return error
        gone = [view.keep for view in self._keep if isinstance(view, View) and view.region is not None]
        if not gone:
            return error
        names = " or ".join(dict.fromkeys(repr(tensor.name) for tensor in gone))
        return KldLookupError(error.status, f"the attached tensor {names} is no longer published: its owner took it back or "
                              "is gone; attach() it again once it is")

    def _outlast(self, error: BaseException) -> None:
        """Behind a request that was given up, which its worker may yet compute: until it has ended there. A second
        Ctrl-C does not wait."""
        early = not isinstance(error, KldError) or error.status in (Status.DEADLINE, Status.CANCELLED)
        if not early or self.connection._pending[0].value or not self.result.attempts:
            return
        if have_ended(self.connection, self.request.stream, self):
            for span in self._written:
                span.spoiled = False
        elif isinstance(error, KldTimeoutError):
            raise KldTimeoutError(error.status, f"{error}; {LATE_SECONDS:g} s later it had not ended there, and the "
                                  "arrays in out may still be written") from None


def again(connection: Connection, plan: Plan, tensors: Sequence[Any], outputs: int) -> bool:
    """Call.again() for host memory: of the tensors, the last ones of which are written. False: not aligned."""
    memory, copied_bytes, inputs = connection._memory, 0, len(tensors) - outputs
    written: List[Any] = []
    for tensor, place, (size, item) in zip(tensors, plan.places, plan.extents):
        address = tensor.data_ptr()
        if address % item:
            return False
        span = memory.find(address, size)
        if span is None or not span.region:
            place.data, place.region, place.offset_bytes = address, None, 0
            copied_bytes += size
        else:
            place.data, place.region, place.offset_bytes = None, span.region, address - span.address
            if inputs <= 0:
                written.append(span)
        inputs -= 1
    plan.begin(connection)
    for span in written:  # as in Call.run()
        span.spoiled = True
    try:
        submit(connection, plan.reference, tensors, False)
    except KldError as error:
        for span in written:
            span.spoiled = not error.is_unseen
        raise
    for span in written:
        span.spoiled = False
    if memory.shared:
        connection._copied_bytes += copied_bytes
    return True


def submit(connection: Connection, reference: Any, keep: Any, in_place: bool,
           meanwhile: Optional[Callable[[], None]] = None) -> None:
    """Until the answer. meanwhile: what to do until there is one; not done, or done in vain, where something is
    raised. Where there is no room for the memory of the request, once more without what is kept for later ones; but
    not where a device may have begun to write over what it reads."""
    first = status = _submit_once(connection, reference, keep, meanwhile)
    no_room = status == Status.TOO_LARGE or (status == Status.NO_MEMORY and not in_place)
    if no_room and connection._memory.forget_cached():
        status = _submit_once(connection, reference, keep, meanwhile)
    if status:
        raise _failure(connection, first, status)


def _failure(connection: Connection, first: int, status: int) -> KldError:
    """(Not made where it is raised: a frame with its own exception keeps what it has, until the garbage is collected.)"""
    error = from_status(status, connection._error[0].text.decode(errors="replace"))
    # (FORBIDDEN may be of the server that came after one which had the request.)
    if first == status == Status.GONE:
        unseen = not _was_lost(connection)
    else:
        unseen = first in _NOT_STARTED and status in _NOT_STARTED - {Status.FORBIDDEN}
    error.is_unseen = unseen and connection._result.attempts <= 1
    return error


def _was_lost(connection: Connection) -> bool:
    """A server, since this was asked last: libkld also says of a tensor that did not come back that it is gone, and then
    one that is lost may have had the request."""
    before, connection._losses = connection._losses, _library.library().kld_losses(connection._handle)
    return connection._losses != before


def _submit_once(connection: Connection, reference: Any, keep: Any, meanwhile: Optional[Callable[[], None]]) -> int:
    """Until the answer. Ctrl-C gives the request up, and waits until its memory was let go of; a second one
    leaves that to who uses the connection next."""
    library, handle = _library.library(), connection._handle
    (_, error_ref), result = connection._error, connection._result_ref
    pending, pending_ref = connection._pending
    connection._held = keep
    try:
        if meanwhile is None:
            status = library.kld_run_slice(handle, reference, SLICE_MS, pending_ref, result, error_ref)
        else:
            status = library.kld_run_slice(handle, reference, 0, pending_ref, result, error_ref)
            if not status:
                meanwhile()
        while pending.value:  # between two looks the interpreter handles signals
            if exiting.is_set() and threading.current_thread() is not threading.main_thread():
                raise KldConnectionError(Status.UNAVAILABLE, "the process ends; the request was given up")
            status = library.kld_wait_slice(handle, pending_ref, SLICE_MS, result, error_ref)
    except BaseException:
        library.kld_cancel(handle, pending)
        connection._finish()
        raise
    finally:
        if not pending.value:
            connection._held = None
    return int(status)


def have_ended(connection: Connection, stream: int, keep: Any) -> bool:
    """Waits for the requests of a stream before this, those included that were given up: a small one comes behind them.
    False: not within LATE_SECONDS, or their worker was lost, which says nothing of when it ended."""
    library, result = _library.library(), connection._result
    (_, error_ref), (pending, pending_ref) = connection._error, connection._pending
    request, one = _library.Request(stream=stream, timeout_ns=int(LATE_SECONDS * 1e9)), c.c_float(1.0)
    _fill_op(request.op, Parameters(), (1,))
    for name in ("predictions", "targets"):
        request.op.tensor[_library.SLOT[name]].dtype = _library.DTYPE["float32"]
        request.bytes[_library.SLOT[name]].data = c.addressof(one)
    connection._held = keep, request, one
    try:
        status = library.kld_run_slice(connection._handle, c.byref(request), SLICE_MS, pending_ref, connection._result_ref,
                                       error_ref)
        while pending.value and not exiting.is_set():
            status = library.kld_wait_slice(connection._handle, pending_ref, SLICE_MS, connection._result_ref, error_ref)
    finally:
        if not pending.value:
            connection._held = None
    return not (status or pending.value) and bool(result.attempts == 1)


__all__ = ["Call", "KldError", "Parameters", "Plan", "View", "again", "have_ended", "row_stride", "submit", "timeout_ns"]
