"""A connection to a server, or to the kernels in this process.

Threads. libkld gives a connection to one thread at a time; here each call takes the connection's lock,
so any thread may use one, and they take turns. For requests side by side open a connection for each
thread. Processes: a child made by fork() must connect by itself; using its parent's is an error.

Signals. A handler may raise between any two calls of Python, so the lock is taken and let go of by one call of C
each (CPython 3.10 and newer look for signals behind calls and before loops only), and what a request reads and
writes is the connection's until it has ended (`_held`).
"""
from __future__ import annotations

import atexit
import collections
import ctypes as c
import itertools
import math
import os
import random
import threading
import time
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Mapping, Optional, Sequence, Set, \
    SupportsFloat, Tuple, Type, TypeVar, Union

import numpy as np

from . import _arrays, _library, _share
from ._asking import Question, ask
from ._checks import check_number, check_shape, sizes_of
from ._errors import (KldBusyError, KldConnectionError, KldLookupError, KldTimeoutError, KldTypeError,
                      KldUnsupportedError, KldValueError, Status)
from ._memory import Memory, finaliser
from ._opening import check_whole, one_url, opened, options_of
from ._request import PLANS_MAX, SLICE_MS, Call, Parameters, Plan, exiting, row_stride, timeout_ns

if TYPE_CHECKING:
    from ._device import Devices

GRADIENTS = ("predictions", "targets")
Made = TypeVar("Made")
_AT_ONCE = (False,)  # of Lock.acquire()
# Between two looks for a name that is not there yet, doubled with each: libkld's, too.
ATTACH_AGAIN, ATTACH_AGAIN_MAX = 0.01, 0.32
ANSWER_SECONDS = 0.5  # at least, for a server that is asked
PARTING = 1.0  # seconds for a request that was given up because the interpreter ends


@dataclass(frozen=True)
class ServerInfo:
    """What is at the other end of a connection."""

    backend: str  #: "cpu" or "cuda"
    device: str
    epoch: int  #: changes when the worker was restarted; 0 where unknown
    device_index: int
    devices: int  #: that the server has; 0 where unknown
    version: str = ""  #: release of the server; empty where unknown


@dataclass(frozen=True, eq=False)  # of arrays == makes another one
class Result:
    """What a request gave. Arrays are the caller's; they outlive the connection. Where the inputs are on a
    GPU they are `kld.DeviceArray`s there."""

    loss: Any  #: a float; an array for the reductions "none" and "row"
    grad_predictions: Any  #: None where not asked for
    grad_targets: Any
    row_loss: Any
    queue_s: float  #: as the server measured them; 0 where unknown
    kernel_s: float
    total_s: float  #: from call to answer
    attempts: int  #: more than 1 where a lost server made libkld ask again


def gradients_wanted(grad: Union[bool, np.bool_, str, Sequence[str]]) -> Tuple[str, ...]:
    if isinstance(grad, (bool, np.bool_)):
        return ("predictions",) if grad else ()
    names = ({"both": GRADIENTS}.get(grad, (grad,)) if isinstance(grad, str) else
             tuple(grad) if isinstance(grad, (tuple, list, set, frozenset)) else (grad,))
    for name in names:
        if name not in GRADIENTS:
            raise KldValueError(Status.INVALID, f"grad is True, False, \"predictions\", \"targets\" or \"both\", "
                                f"not {name!r}")
    return tuple(names)


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()


class Connection:
    """Made by kld.connect(). A context manager; close() at its end."""

    def __init__(self, url: Union[str, Sequence[str]], *, token: Optional[str] = None, ca_file: Optional[str] = None,
                 client_name: str = "python", connect_timeout: float = 5.0, threads: int = 0,
                 staging_bytes_max: int = 0, cache_bytes_max: int = 4 << 30, part_bytes_max: int = 0,
                 part_timeout: float = 60.0, cert_file: Optional[str] = None, key_file: Optional[str] = None) -> None:
        url = one_url(url)
        cache_bytes_max = check_whole("cache_bytes_max", cache_bytes_max, (1 << 64) - 1)
        options = options_of(url, token, ca_file, client_name, connect_timeout, threads, staging_bytes_max, part_bytes_max,
                             part_timeout, cert_file, key_file)
        self.url = url
        self.number = next(_numbers)  #: of all that this process ever made
        _by_number[self.number] = self
        self._handle = c.c_void_p()
        self._lock = threading.RLock()  # never taken twice; it knows whose it is
        self._is_mine: Callable[[], bool] = getattr(self._lock, "_is_owned")
        self._closing = False  # close() came inside of a request
        self._held: Any = None  # a Call: what libkld has a request for keeps its memory, whatever was raised
        self._asked: Optional[Question] = None  # likewise: another thread has libkld's connection until it has ended
        self._waited_ns = 0  # of a request's timeout, for the lock
        self._dropped: Deque[Any] = collections.deque()  # regions of attached tensors that are gone; any thread
        self._process = os.getpid()
        self._copied_bytes = 0
        self._losses = 0  # of servers, as of the last request whose tensor was gone
        # Under the lock: what each request uses again.
        self._plans: Dict[Any, Plan] = {}
        self._known: Dict[Any, Plan] = {}  # _autograd.py: of dense tensors
        self._calls: Dict[Any, Any] = {}  # _repeated.py, of any thread
        self._result, error = _library.Result(), _library.Error()
        self._result_ref, self._error = c.byref(self._result), (error, c.byref(error))
        number = c.c_uint64()
        self._pending = number, c.byref(number)
        self._gpus: Optional[Devices] = None
        self._published: Set[_share.Published] = set()
        # GPU and stream -> tensors of requests that may still write although they have ended
        self._limbo: Dict[Tuple[int, int], List[Any]] = {}
        self._handle = opened(url, options)
        self._memory = Memory(self._handle, url.startswith("unix:"), cache_bytes_max)

    @staticmethod
    def by_number(number: int) -> Optional[Connection]:
        return _by_number.get(number)

    # ---- Computing

    def kl_div(self, predictions: Any, targets: Any, *, divergence: str = "forward_kl",
               reduction: str = "batchmean", predictions_form: Optional[str] = None,
               targets_form: Optional[str] = None,
               temperature: Optional[SupportsFloat] = None, beta: Optional[SupportsFloat] = None,
               skew: Optional[SupportsFloat] = None, weight: Optional[SupportsFloat] = None,
               scale: Optional[SupportsFloat] = None, normalizer: Optional[SupportsFloat] = None,
               row_weights: Any = None, row_mask: Any = None, grad: Union[bool, np.bool_, str, Sequence[str]] = True,
               grad_output: Any = None, row_loss: bool = False,
               out: Optional[Mapping[str, Any]] = None,
               timeout: Optional[float] = None) -> Result:
        """The divergence of two arrays of one shape, and its gradients, in one request.

        The last dimension holds the classes, the leading ones the rows. Each side is given as "probs",
        "logprobs" or "logits" (default "probs", or as an attached tensor was published) and may be float32, float64,
        float16 or (ml_dtypes) bfloat16.

        grad: True or "predictions", "targets", "both", False. A gradient is that of the loss times
        grad_output (a number; for the reductions "none" and "row" an array of the loss's shape), with
        respect to the tensor in the form it was given in, and of its dtype.
        row_weights, row_mask: one value a row, of shape [rows] or of the leading dimensions; a row whose
        mask is 0 is left out. normalizer: in place of the divisor of mean, batchmean, rowmean.
        out: arrays to write results to, by name: "loss" (reductions "none", "row"), "row_loss",
        "grad_predictions", "grad_targets"; a gradient may be written over its own tensor.
        timeout: seconds (None, inf: no limit); over it KldTimeoutError. Memory of `out` that the server shares, from
        empty() or on a GPU, is written until it has noticed: that is waited for, 5 s at most, and where it was not enough
        the error says that they may still be written.

        Arrays from empty() are used where they lie. Others are copied once. Arrays on a GPU (CuPy, JAX,
        PyTorch: whatever has __cuda_array_interface__ or DLPack) are used where they lie, by a server or a
        libkld with that GPU; their results are on it too.
        """
        given = _arrays.check_out(out)
        wanted = [f"grad_{name}" for name in gradients_wanted(grad)]
        wanted += [name for name in given if name.startswith("grad_") and name not in wanted]
        sides = _arrays.Sides(self, predictions, targets)
        q, p = sides.predictions, sides.targets
        _arrays.check_shapes(q.shape, p.shape)
        leading = q.shape[:-1]
        loss_shape = q.shape if reduction == "none" else leading if reduction == "row" else None
        loss_dtype = "float64" if "float64" in (q.dtype, p.dtype) else "float32"
        number = grad_output if grad_output is None or np.ndim(grad_output) == 0 and loss_shape is None else None
        parameters = Parameters(divergence, reduction, sides.form("predictions", predictions_form),
                                sides.form("targets", targets_form), temperature, beta, skew, weight, scale,
                                normalizer, number)
        vectors = []
        if row_weights is not None or row_mask is not None:
            shapes = ((math.prod(leading),), leading)
            vectors = [(name, sides.vector(name, value, "float32", shapes)) for name, value in
                       (("row_weights", row_weights), ("row_mask", row_mask)) if value is not None]
        if grad_output is not None and number is None:
            vectors.append(("grad_output", sides.vector("grad_output", grad_output, loss_dtype,
                                                        (loss_shape if loss_shape is not None else (),))))
        if loss_shape is not None:
            wanted.append("loss")
        elif "loss" in given:
            raise KldValueError(Status.INVALID, "out[\"loss\"] is for the reductions \"none\" and \"row\"; "
                                "another loss is a number")
        if row_loss or "row_loss" in given:
            wanted.append("row_loss")

        def kind(name: str) -> Tuple[str, Tuple[int, ...]]:
            return ((q.dtype, q.shape) if name == "grad_predictions" else
                    (p.dtype, p.shape) if name == "grad_targets" else
                    (loss_dtype, leading if name == "row_loss" or loss_shape is None else loss_shape))

        # Before the request asks where they all are.
        views = {name: sides.output_of(name, given[name], *kind(name)) for name in wanted if name in given}

        def request() -> Result:
            made: Dict[str, Any] = {}
            with sides.current():
                call = Call(self, parameters, q.shape, timeout, sides.where())
                call.input("predictions", q)
                call.input("targets", p)
                for name, view in vectors:
                    call.vector(name, view)
                for name in wanted:
                    if name in views:
                        made[name] = given[name]
                        call.output(name, views[name])
                    else:
                        made[name] = sides.make(call, name, *kind(name))
                call.run()
            result = self._result
            return Result(made.get("loss", result.loss), made.get("grad_predictions"), made.get("grad_targets"),
                          made.get("row_loss"), result.queue_ns * 1e-9, result.kernel_ns * 1e-9,
                          result.total_ns * 1e-9, result.attempts)

        return self._alone(request, timeout)

    def empty(self, shape: Union[int, Sequence[int]], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """An array, its contents anything, in memory that the server shares: kl_div() reads and writes
        it, and whatever views of it are made, without a copy. It may outlive the connection. Over http:
        and local: it is ordinary memory."""
        sizes = sizes_of(shape)
        name = _arrays.name_of(dtype)
        size = _arrays.dtype_of(name).itemsize
        for dimension in sizes:
            size *= dimension
        return _arrays.array_of(self._alone(lambda: self._memory.take(size, self._tidy)), name, sizes)

    # ---- Shared between processes

    def publish(self, name: str, array: Any, form: str = "probs", *, uids: Sequence[int] = ()) -> _share.Published:
        """Lets other processes compute with this tensor, where it lies, under a name of this user: those of
        the same user, and of the users named. Over unix: only. An array from empty() or on a GPU is
        published itself, after what writes it has ended; another is copied into shared memory once."""
        _share.check_form(form)
        if not self._memory.shared:
            raise KldUnsupportedError(Status.UNIMPLEMENTED, "tensors are published over unix: only, not over "
                                      f"{self.url}")
        sides = _arrays.Sides(self, array, array, ("array", "array"))
        view = sides.predictions
        check_shape(view.shape)
        if view.ordinal is None:
            span = self._alone(lambda: self._memory.find(view.address, 1))
            if span is None or not span.region or row_stride(view) is None:
                shared = self.empty(view.shape, view.dtype)
                np.copyto(shared, view.keep)
                array, view = shared, _arrays.view_of("array", shared)

        def publish() -> _share.Published:
            with sides.current():
                sides.finish()
                return _share.publish(self, name, form, view, uids, array)

        return self._alone(publish)

    def attach(self, name: str, *, timeout: Optional[float] = 0.0, uid: Optional[int] = None) -> _share.Attached:
        """A tensor that another process of this user (or of the user `uid`, who named this one) has published,
        for kl_div() in the place of an array. timeout: seconds to wait for it (None: until it is there), then
        KldLookupError; KldTimeoutError where the server says nothing."""
        seconds = math.inf if timeout is None else check_number("timeout", timeout)
        if not 0 <= seconds < 1e9 and seconds != math.inf:
            raise KldValueError(Status.INVALID, f"timeout is a number of seconds from 0 on, below 1e9, or inf, not "
                                f"{timeout}")
        until, pause = time.monotonic() + seconds, ATTACH_AGAIN
        while True:  # here, and not in libkld: for signals, and for requests of other threads
            left = until - time.monotonic()
            try:
                limit = max(left, ANSWER_SECONDS) if seconds else None
                return self._alone(lambda: _share.attach(self, name, uid, limit),
                                   max(left, ATTACH_AGAIN) if seconds else None)
            except KldLookupError as error:
                if error.status != Status.NOT_FOUND or left <= 0:
                    raise
            time.sleep(max(0.0, min(until - time.monotonic(), pause * random.uniform(0.75, 1.25))))
            pause = min(2 * pause, ATTACH_AGAIN_MAX)

    # ---- About the server

    def info(self) -> ServerInfo:
        info = _library.ServerInfo()
        self._alone(lambda: _library.call("kld_info", self._handle, c.byref(info)))
        backend, device, version = (text.decode(errors="replace") for text in (info.backend, info.device, info.version))
        return ServerInfo(backend, device, info.epoch, info.device_index, info.devices, version)

    def ping(self) -> float:
        """Seconds of a round trip that computes nothing."""
        spent = c.c_uint64()
        self._alone(lambda: ask(self, "kld_ping", self._handle, c.byref(spent)))
        return float(spent.value) * 1e-9

    def stats(self) -> Dict[str, int]:
        """The server's counters; over http: read /metrics instead."""
        stats = _library.ServerStats()
        self._alone(lambda: ask(self, "kld_stats", self._handle, c.byref(stats)))
        return {name: int(getattr(stats, name)) for name, *_ in stats._fields_}

    @property
    def copied_bytes(self) -> int:
        """Bytes of tensors that were copied on this side so far: inputs not in shared memory, and results
        below 64 KiB, which are cheaper copied than shared."""
        return self._copied_bytes

    # ---- Its life

    def close(self) -> None:
        """No requests from here on. Arrays stay valid. May be called twice, and waits for the request of
        another thread. From a signal handler that came into a request of this thread: at that request's end.

        It also waits until the streams on a GPU have gone past the last result that they wait for:
        for no more of what is enqueued, and for a server only as long as it answers. Behind one that does not, they
        go on without the results, with a RuntimeWarning. Ctrl-C ends the wait; the connection is open then."""
        if os.getpid() != self._process:
            return  # the parent's; its lock may be taken for ever here
        if self._is_mine():
            self._closing = True
            return
        got: List[bool] = []
        try:
            got.extend(map(self._lock.acquire, (True,)))
            self._end()
        finally:
            if got:
                self._lock.release()
            if self._memory._returned:  # meanwhile
                self._tidy()

    def _end(self) -> None:
        """Under the lock."""
        end, nothing, may_end = _library.library().kld_close, c.c_void_p(), True
        if self._handle and self._gpus is not None:
            # At the interpreter's end no other thread may have a turn any more.
            until = time.monotonic() + PARTING if exiting.is_set() else math.inf
            may_end = self._finish_asking(until) and self._gpus.unpin()
        handle, self._handle = self._handle, nothing
        if handle:
            if may_end and not (self._asked and self._asked.close_behind(handle)):
                end(handle)  # waits for what local: still computes
            self._held, self._pending[0].value = None, 0
            self._memory.end()
            self._published.clear()
            self._dropped.clear()
            self._limbo.clear()
            if self._gpus is not None:
                self._gpus.end()

    @property
    def closed(self) -> bool:
        return self._closing or not self._handle

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        self.close()

    @finaliser
    def __del__(self) -> None:
        if getattr(self, "_memory", None) is not None:
            self.close()

    def __repr__(self) -> str:
        return f"<kld.Connection {self.url}{' (closed)' if self.closed else ''}>"

    def __copy__(self) -> Connection:
        return self

    def __deepcopy__(self, memo: Any) -> Connection:
        """Itself: a copy of a model, say, uses it as well."""
        return self

    def __reduce__(self) -> Any:
        raise KldTypeError(Status.INVALID, "a connection belongs to its process and cannot be pickled; pickle what holds "
                           "it without it (a KLDivLoss: with connection=None) and connect again where it is unpickled")

    # ---- One at a time

    def _alone(self, work: Callable[..., Made], timeout: Optional[float] = None, *arguments: Any) -> Made:
        """What work(*arguments) gives, which has the connection to itself. timeout: of the request that it is."""
        if os.getpid() != self._process:
            raise KldConnectionError(Status.UNAVAILABLE, "this connection was made before fork(); connect again in "
                                     "the child")
        if self._is_mine():
            raise KldBusyError(Status.BUSY, "this connection is in the middle of a call of this thread, which a signal "
                               "handler came into; expected another connection there")
        got: List[bool] = []
        try:
            # What acquire() says is in `got` before any signal is looked for.
            got.extend(map(self._lock.acquire, _AT_ONCE))
            self._waited_ns = 0
            if not got[0] or self._pending[0].value or self._asked:
                self._wait_for_turn(got, timeout)
            if not self._handle:
                raise KldConnectionError(Status.UNAVAILABLE, "this connection was closed")
            return work(*arguments)
        finally:
            if got and got[-1]:
                try:
                    if self._closing:
                        self._end()
                finally:
                    self._lock.release()
                if self._memory._returned or self._dropped:
                    self._tidy()

    def _wait_for_turn(self, got: List[bool], timeout: Optional[float]) -> None:
        """For the lock, and behind a request that an exception left running."""
        start, limit_ns = time.monotonic(), timeout_ns(timeout)
        until = start + limit_ns * 1e-9 if limit_ns else math.inf
        if not got[-1]:
            got.extend(map(self._lock.acquire, (True,), (limit_ns * 1e-9 if limit_ns else -1,)))
        late = not got[-1] or bool(self._handle) and not self._finish(until)
        self._waited_ns = int((time.monotonic() - start) * 1e9)
        if late or limit_ns and self._waited_ns >= limit_ns:
            raise KldTimeoutError(Status.DEADLINE, "the timeout passed behind another request of this connection")

    def _finish(self, until: float = math.inf) -> bool:
        """Waits until libkld has no request any more; False: not before then. Under the lock."""
        library, (pending, reference) = _library.library(), self._pending
        if not self._finish_asking(until):
            return False
        while pending.value:
            if exiting.is_set():
                until = min(until, time.monotonic() + PARTING)
            if time.monotonic() > until:
                return False
            library.kld_wait_slice(self._handle, reference, SLICE_MS, self._result_ref, self._error[1])
        self._held = None
        return True

    def _finish_asking(self, until: float = math.inf) -> bool:
        if exiting.is_set():  # its thread may have no turn any more
            until = min(until, time.monotonic() + PARTING)
        if self._asked and not self._asked.wait(-1.0 if until == math.inf else max(0.0, until - time.monotonic())):
            return False
        self._asked = None
        return True

    def _devices(self) -> Devices:
        if self._gpus is None:
            from ._device import Devices  # which nobody without a GPU needs
            self._gpus = Devices(self)
        return self._gpus

    def known(self, key: Any) -> Optional[Plan]:
        """Under the lock."""
        try:
            return self._known.get(key)
        except TypeError:  # an argument that is no number: it will be said
            return None

    def remember(self, key: Any, plan: Plan) -> None:
        """Under the lock."""
        if len(self._known) >= PLANS_MAX:
            self._known.clear()
        self._known[key] = plan

    @finaliser
    def _tidy(self) -> None:
        """Takes in memory that arrays gave back, unless the connection is in use: then its user does it."""
        if os.getpid() != self._process:
            self._memory.let_go()  # of the child's mapping, in which nobody takes the lock
            return
        if not (self._memory._returned or self._dropped) or self._is_mine():
            return
        got: List[bool] = []
        try:
            got.extend(map(self._lock.acquire, _AT_ONCE))
            if got[0] and not self._handle:
                self._memory.let_go()
            elif got[0] and not self._asked:
                self._memory.collect()
                while self._dropped:
                    _library.library().kld_region_drop(self._dropped.popleft())
        finally:
            if got and got[0]:
                try:
                    if self._closing:
                        self._end()
                finally:
                    self._lock.release()


def _at_exit() -> None:
    """What still computes must not outlive the interpreter, whose memory it uses: local: is waited for, whoever asked it.
    A daemon thread gives up what it waits for."""
    exiting.set()
    for connection in list(_by_number.values()):
        asked = connection._asked
        if asked:
            asked.wait(PARTING)
        if connection._pending[0].value:
            connection._closing = True  # by that thread, which may be faster
            connection.close()


atexit.register(_at_exit)
