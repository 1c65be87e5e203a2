"""A call of kl_div() like one before it: two dense tensors, both on the CPU or both on one GPU, the loss one number, no
masks or weights of rows, and at most the input wants its gradient. What _autograd.py found out about the first is kept
(`Known`, `KnownOnGpu`), and only what can be another each time is looked at: the tensors, and where they lie. All other
calls are _autograd.py's.

The request is on its way before autograd is told of it: PyTorch makes its node while the server computes.
"""
from __future__ import annotations

import ctypes as c
import struct
from typing import Any, Callable, List, Optional, Tuple

import torch

from . import _cuda, _library
from ._autograd import (CPU, NO_SECOND_DERIVATIVE, NUMBER, SECOND_TIME, Job, current_stream, keeps_graph, make_empty,
                        number_of, times)
from ._connection import Connection
from ._default import made_for_cpu_tensors, made_for_gpu
from ._device import Place, Where
from ._errors import KldError, KldUnsupportedError, Status
from ._request import PLANS_MAX, Call, Plan, submit
from ._surroundings import PLAIN, are_ordinary

Asked = Tuple[Any, ...]  #: arguments of a call that are no tensors
Made = Tuple["Known", Connection, torch.Tensor, Optional[torch.Tensor]]  #: the gradient; on a GPU, the loss

_REDUCTIONS = ("mean", "batchmean", "sum", "rowmean")
_HALF = torch.float16  # whose gradients _half.py knows about
_AT, _PLACE, _SLOT = _library.Request.bytes.offset, c.sizeof(_library.Bytes), _library.SLOT
# struct kld_bytes of predictions and targets, and of the gradient; on a GPU of the loss, too. There are no other tensors.
_INPUTS = struct.Struct("PPQPPQ")
_ALL = struct.Struct(f"PPQPPQ{(_SLOT['grad_predictions'] - 2) * _PLACE}xPPQ")
_WITH_LOSS = struct.Struct(f"PPQPPQ{(_SLOT['loss'] - 2) * _PLACE}xPPQ")
_ALL_WITH_LOSS = struct.Struct(f"PPQPPQ{(_SLOT['loss'] - 2) * _PLACE}xPPQ"
                               f"{(_SLOT['grad_predictions'] - _SLOT['loss'] - 1) * _PLACE}xPPQ")
assert (_SLOT["predictions"], _SLOT["targets"], _INPUTS.size) == (0, 1, 2 * _PLACE)
assert _SLOT["targets"] < _SLOT["loss"] < _SLOT["grad_predictions"]


class Known:
    """A kind of call. Made once, read by any thread; the request of its plan is written to under the connection's lock."""

    __slots__ = ("plan", "job", "timeout", "shape", "input_bytes", "target_bytes", "input_odd", "target_odd", "dtype", "wanted",
                 "loss_dtype", "loss_number")

    def __init__(self, plan: Plan, job: Job, input: torch.Tensor, target: torch.Tensor, wanted: bool) -> None:
        # Not the job's connection, whose this is: it ends with its last user.
        self.plan, self.job, self.wanted = plan, job._replace(connection=None), wanted  # type: ignore[arg-type]
        self.timeout, self.shape, self.dtype = job.timeout, tuple(input.shape), input.dtype
        self.loss_dtype = torch.float64 if torch.float64 in (input.dtype, target.dtype) else torch.float32
        self.loss_number = NUMBER[self.loss_dtype]
        (self.input_bytes, item), (self.target_bytes, other) = plan.extents[:2]
        self.input_odd, self.target_odd = item - 1, other - 1  # bits of an address that is not aligned

    def run(self, connection: Connection, input: torch.Tensor, target: torch.Tensor, input_at: int,
            target_at: int) -> torch.Tensor:
        """One request, of tensors at these addresses. Under the lock."""
        memory, plan, size = connection._memory, self.plan, self.input_bytes
        copied_bytes, span, gradient = 0, None, None
        first, second = memory.place(input_at, size), memory.place(target_at, self.target_bytes)
        if memory.shared:
            copied_bytes = (size if first[0] else 0) + (self.target_bytes if second[0] else 0)
        if not self.wanted:
            _INPUTS.pack_into(plan.request, _AT, *first, *second)
        else:
            gradient = make_empty(connection, self.shape, self.dtype, size)
            third = at, _, _ = memory.place(gradient.data_ptr(), size)
            if not at:
                span = memory.find(gradient.data_ptr(), size)
            elif memory.shared:
                copied_bytes += size
            _ALL.pack_into(plan.request, _AT, *first, *second, *third)
        plan.begin(connection)
        made: List[Any] = []

        def make() -> None:
            loss = (torch.empty((), dtype=self.loss_dtype, device=CPU) if gradient is None else
                    KlDivKnown.apply(input, target, (self, connection, gradient, None)))
            # An operator that writes it takes some microseconds, behind a wait.
            made[:] = loss, self.loss_number.from_address(loss.data_ptr())

        if span is not None:  # as in Call.run()
            span.spoiled = True
        try:
            submit(connection, plan.reference, (input, target, gradient), False, make)
        except KldError as error:
            if span is not None:
                span.spoiled = not error.is_unseen
            raise
        if span is not None:
            span.spoiled = False
        connection._copied_bytes += copied_bytes
        loss: torch.Tensor
        loss, value = made
        value.value = connection._result.loss
        return loss


class _OnGpu(Call):
    """Call, of a request whose plan says where its tensors are."""

    __slots__ = ()

    def __init__(self, connection: Connection, where: Where, keep: Any, meanwhile: Optional[Callable[[], None]]) -> None:
        self.connection, self.where, self._keep, self._meanwhile = connection, where, keep, meanwhile
        self.in_place, self.bounced, self.copied_bytes, self.result = False, [], 0, connection._result


class KnownOnGpu(Known):
    __slots__ = ("device", "ordinal")

    def __init__(self, plan: Plan, job: Job, input: torch.Tensor, target: torch.Tensor, wanted: bool) -> None:
        super().__init__(plan, job, input, target, wanted)
        self.device, self.ordinal = input.device, input.get_device()

    def run(self, connection: Connection, input: torch.Tensor, target: torch.Tensor, input_at: int,
            target_at: int) -> Optional[torch.Tensor]:
        """None: the memory of a tensor was not what it had been, or has no handle."""
        loss = torch.empty((), dtype=self.loss_dtype, device=self.device)
        gradient = torch.empty(self.shape, dtype=self.dtype, device=self.device) if self.wanted else None
        at = [(input_at, self.input_bytes, False), (target_at, self.target_bytes, False),
              (loss.data_ptr(), loss.element_size(), True)]
        if gradient is not None:
            at.append((gradient.data_ptr(), self.input_bytes, True))
        made = loss

        def make() -> None:
            nonlocal made
            made = KlDivKnown.apply(input, target, (self, connection, gradient, loss))

        gpu, devices = _cuda.gpu(self.ordinal), connection._devices()
        where = Where(gpu, current_stream(self.ordinal), early=True)
        call = _OnGpu(connection, where, (input, target, gradient, loss), None if gradient is None else make)
        with gpu.current():
            read: List[Place] = []
            words: List[int] = []
            for address, size, written in at:
                if devices.is_local:
                    words += address, 0, 0
                    continue
                place = devices.find_again(address, size, written)
                if place is None:
                    return None
                words += 0, place.region.value or 0, place.offset
                if not written:
                    read.append(place)
            (_WITH_LOSS if gradient is None else _ALL_WITH_LOSS).pack_into(self.plan.request, _AT, *words)
            call.go(self.plan)
            return made if devices.are_there(read) else None


class KlDivKnown(torch.autograd.Function):
    """KlDiv of _autograd.py, of a Known."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, target: torch.Tensor, made: Made) -> torch.Tensor:
        """A loss without its value: the server computes yet."""
        ctx.made = made[:3]
        if keeps_graph is None:
            ctx.save_for_backward(input, target)
        return torch.empty((), dtype=made[0].loss_dtype, device=CPU) if made[3] is None else made[3]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise KldUnsupportedError(Status.UNIMPLEMENTED, NO_SECOND_DERIVATIVE)
        known, connection, gradient = ctx.made
        kept = keeps_graph is not None and keeps_graph()
        if gradient is None:
            if keeps_graph is not None:
                raise RuntimeError(SECOND_TIME)
            tensors = [tensor.detach() for tensor in ctx.saved_tensors]
            _, (gradient, _) = known.job._replace(connection=connection).run((tensors[0], tensors[1]), (True, False))
        if not kept:
            ctx.made = known, connection, None  # autograd keeps it: no copy
        if kept or gradient.is_cuda or number_of(grad_outputs[0]) != 1:  # nobody waits for a GPU's number
            gradient = times(gradient, grad_outputs[0], "mean", kept, 0)
        return gradient, None, None


def kl_div(input: Any, target: Any, connection: Optional[Connection], asked: Asked) -> Optional[torch.Tensor]:
    """None: not of a kind that is known, or something is wrong, which _autograd.py says."""
    if type(input) not in PLAIN or type(target) not in PLAIN:
        return None
    if input.is_cpu and target.is_cpu:
        ordinal = -1
        if connection is None:
            connection = made_for_cpu_tensors(torch.get_num_threads())
    elif input.is_cuda and target.is_cuda:
        ordinal = input.get_device()
        if target.get_device() != ordinal:
            return None
        if connection is None:
            connection = made_for_gpu(ordinal)
    else:
        return None
    if type(connection) is not Connection:
        return None
    grad = torch.is_grad_enabled()
    try:
        shape = input.shape
        known = connection._calls.get((asked, shape, input.dtype, target.dtype, grad and input.requires_grad, ordinal))
        if known is None or target.shape != shape or not input.is_contiguous() or not target.is_contiguous():
            return None
        input_at, target_at = input.data_ptr(), target.data_ptr()
    except (TypeError, RuntimeError):  # an argument that is no number; a tensor that is nested, sparse, without memory
        return None
    if input_at & known.input_odd or target_at & known.target_odd or grad and target.requires_grad:
        return None
    if input.is_neg() or target.is_neg() or not are_ordinary(input, target):
        return None
    loss: Optional[torch.Tensor] = connection._alone(known.run, known.timeout, connection, input, target, input_at,
                                                     target_at)
    return loss


def learn(input: torch.Tensor, target: Any, asked: Asked, job: Job, wanted: bool) -> None:
    """This call went well."""
    connection = job.connection
    if (type(input) not in PLAIN or type(target) not in PLAIN or input.dim() == 0
            or job.parameters.reduction not in _REDUCTIONS or _HALF in (input.dtype, target.dtype)):
        return
    wanted = wanted and input.requires_grad
    plan = connection.known(job._kind((input, target), (wanted, False), None))
    if plan is not None:
        if len(connection._calls) >= PLANS_MAX:
            connection._calls.clear()
        kind, ordinal = (Known, -1) if input.is_cpu else (KnownOnGpu, input.get_device())
        connection._calls[(asked, input.shape, input.dtype, target.dtype, wanted, ordinal)] = kind(plan, job, input, target,
                                                                                                   wanted)


__all__ = ["Asked", "Known", "KnownOnGpu", "kl_div", "learn"]
