"""Published and attached tensors: one process publishes a tensor under a name, others compute with it where
it lies. Over unix: only. Runs under the lock of the connection, but for the objects' plain fields.

When a tensor may be read is for the processes to settle: a request reads what is there when it runs.
"""
from __future__ import annotations

import ctypes as c
import math
import operator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple, Type, TypeVar

from . import _library
from ._asking import ask
from ._errors import KldConnectionError, KldError, KldTypeError, KldValueError, Status
from ._memory import finaliser
from ._request import View, row_stride

if TYPE_CHECKING:
    from ._connection import Connection

_OWN = "this connection publishes that tensor itself; use its region"  # libkld's words (client/unix_share.c)
UIDS_END = (1 << 32) - 1  # behind the last: it means nobody

Self = TypeVar("Self", bound="_Shared")
_DTYPE_OF = {number: name for name, number in _library.DTYPE.items()}


class _Shared:
    """What both ends have: a name, a shape, an end."""

    _instead: str

    def __init__(self, connection: Connection, name: str, form: str, dtype: str, shape: Tuple[int, ...]) -> None:
        self.connection, self.name, self.form = connection, name, form
        self.dtype, self.shape = dtype, shape
        self._closed = False

    @property
    def closed(self) -> bool:
        """Likewise where its connection is."""
        return self._closed or self.connection.closed

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        _quietly(self.close, kind is not None)

    def __array__(self, *_: Any, **more: Any) -> Any:
        """NumPy would make an object array of one of it, without a word."""
        raise KldTypeError(Status.INVALID, f"{self!r} is no array of NumPy's: {self._instead}")

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: Any) -> Self:
        """Itself, which has one end: a copy of what holds it uses it as well."""
        return self

    def __reduce__(self) -> Any:
        raise KldTypeError(Status.INVALID, f"{self!r} belongs to its process and cannot be pickled; give others its name, "
                           "for attach()")

    def __repr__(self) -> str:
        end = " (closed)" if self.closed else ""
        return f"<kld.{type(self).__name__} {self.name!r} {self.form} {self.dtype}{list(self.shape)}{end}>"


def _quietly(close: Callable[[], None], wanted: bool) -> None:
    """wanted: an exception is on its way already, which is not to be hidden by another."""
    try:
        close()
    except KldError:
        if not wanted:
            raise


class Published(_Shared):
    """A tensor that others may attach to, until close() or the end of the connection. `array` is what they
    see: the one that was given, or its copy in shared memory; write new values there."""

    _instead = "that is its `array`"

    def __init__(self, connection: Connection, name: str, form: str, view: View, array: Any) -> None:
        super().__init__(connection, name, form, view.dtype, view.shape)
        self.array = array
        self._view = view  # keeps the memory

    def check(self) -> None:
        """Raises why not if it could not be published again after a lost server: then close() it and publish
        another. Returns at once."""
        self.connection._alone(self._check)

    def _check(self) -> None:
        if not self._closed:
            _library.call("kld_process", self.connection._handle, 0)
            _library.call("kld_published", self.connection._handle, self.name.encode())

    def close(self) -> None:
        """Takes the tensor off its name. Twice is allowed."""
        if self.closed:
            self._closed = True
            return
        self.connection._alone(self._detach)

    def _detach(self) -> None:
        if self._closed:  # by another thread, meanwhile
            return
        self._closed = True
        self.connection._published.discard(self)
        if self._view.ordinal is not None:
            self.connection._devices().let_go(self)
        ask(self.connection, "kld_detach", self.connection._handle, check_name(self.name))


class Attached(_Shared):
    """A tensor of another process, for kl_div() in the place of an array, as often as wanted."""

    _instead = "its numbers are not in this process; give it to kl_div() as it is"

    def __init__(self, connection: Connection, name: str, region: c.c_void_p, tensor: _library.TensorView) -> None:
        self._region = region  # before it counts as open
        super().__init__(connection, name, _library.FORMS[tensor.form], _DTYPE_OF[tensor.dtype],
                         tuple(tensor.shape[:tensor.rank]))
        self.owner_uid = int(tensor.owner_uid)  #: whose it is
        self._stride = int(tensor.row_stride_bytes)

    def check_open(self) -> None:
        if self.closed:
            raise KldConnectionError(Status.GONE, f"the attached tensor {self.name!r} was closed; expected it open "
                                     "until the last request with it, which may be one of backward()")

    def view(self, connection: Connection) -> View:
        self.check_open()
        if connection is not self.connection:
            raise KldValueError(Status.INVALID, f"the tensor {self.name!r} was attached over another connection; "
                                "expected that one")
        item = _library.ITEM_BYTES[_library.DTYPE[self.dtype]]
        strides = None
        if self._stride:
            strides = tuple(self._stride * math.prod(self.shape[axis + 1:-1])
                            for axis in range(len(self.shape) - 1)) + (item,)
        return View(0, self.dtype, self.shape, strides, self, region=self._region)

    def close(self) -> None:
        """Lets go of it, after the request of another thread that uses it. Twice is allowed."""
        if self.closed:
            self._closed = True
            return
        self.connection._alone(self._drop)

    def _drop(self) -> None:
        if not self._closed:
            self._closed = True
            _library.library().kld_region_drop(self._region)

    @finaliser
    def __del__(self) -> None:
        """Wherever its last user goes: whoever has the connection lets go of the region."""
        if not getattr(self, "closed", True):
            self._closed = True
            self.connection._dropped.append(self._region)
            self.connection._tidy()


def check_name(name: Any) -> bytes:
    if not isinstance(name, str):
        raise KldTypeError(Status.INVALID, f"the name of a tensor is a text, not {type(name).__name__}")
    return _library.text("the name of a tensor", name)


def check_uid(uid: Any) -> int:
    try:
        number = operator.index(uid)
    except TypeError:
        raise KldTypeError(Status.INVALID, f"a user is a whole number, not {type(uid).__name__}") from None
    if not 0 <= number < UIDS_END:
        raise KldValueError(Status.INVALID, f"user {number}; expected 0 to {UIDS_END - 1}")
    return number


def check_uids(uids: Any) -> List[int]:
    try:
        given = list(uids)
    except TypeError:
        raise KldTypeError(Status.INVALID, f"uids is a list of users, not {type(uids).__name__}") from None
    return [check_uid(uid) for uid in given]


def check_form(form: str) -> int:
    if form not in _library.FORMS:
        raise KldValueError(Status.INVALID, f"unknown form {form!r}; expected one of {', '.join(_library.FORMS)}")
    return _library.FORMS.index(form)


def publish(connection: Connection, name: str, form: str, view: View, uids: Sequence[int], array: Any) -> Published:
    """Under the lock. The view is in memory that the server can reach."""
    stride = row_stride(view)
    if stride is None:
        raise KldValueError(Status.INVALID, "a published tensor's rows are contiguous and at one distance of each "
                            "other")
    rows, row_bytes = math.prod(view.shape[:-1]), view.item_bytes * view.shape[-1]
    size = (rows - 1) * (stride or row_bytes) + row_bytes
    if view.ordinal is not None:
        found = connection._devices().region_of(view.address, size)
    else:
        span = connection._memory.find(view.address, size)
        found = None if span is None or not span.region else (span.region, view.address - span.address)
    if found is None:
        raise KldValueError(Status.UNIMPLEMENTED, "this tensor's memory has no one handle to give to other processes "
                            "(cudaMallocAsync; expandable segments, of which this server takes single pieces only); "
                            "copy it into memory that has")
    tensor = _library.TensorView(dtype=_library.DTYPE[view.dtype], form=check_form(form), rank=len(view.shape),
                                 row_stride_bytes=stride, offset_bytes=found[1])
    tensor.shape[:len(view.shape)] = view.shape
    numbers = check_uids(uids)
    users = (c.c_uint32 * max(len(numbers), 1))(*numbers)
    handle, text = connection._handle, check_name(name)
    ask(connection, "kld_publish", handle, text, found[0], c.byref(tensor), users, len(numbers), keep=array,
        undo=lambda: _library.call("kld_detach", handle, text))
    made = Published(connection, name, form, view, array)
    if view.ordinal is not None:
        connection._devices().pin(found[0], made)
    connection._published.add(made)
    return made


def attach(connection: Connection, name: str, uid: Optional[int], seconds: Optional[float]) -> Attached:
    """Under the lock. seconds: for an answer."""
    region, tensor = c.c_void_p(), _library.TensorView()
    wanted = check_name(name), 0, c.byref(region), c.byref(tensor)
    how = ("kld_attach",) if uid is None else ("kld_attach_from", check_uid(uid))
    try:
        ask(connection, how[0], connection._handle, *how[1:], *wanted, seconds=seconds,
            undo=lambda: _library.library().kld_region_drop(region))
    except KldValueError as error:
        if error.text == _OWN:
            raise KldValueError(error.status, f"this connection published {name!r} itself; use the `array` of what "
                                "publish() gave, or another connection") from None
        raise
    return Attached(connection, name, region, tensor)
