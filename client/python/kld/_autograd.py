"""One call of kld.functional.kl_div(), inside autograd: a request that gives the loss and the gradients which
autograd wants; backward() multiplies, or hands over what it has.

On the CPU the request is waited for. On a GPU it is ordered with the current stream, and nothing waits: not
for the loss, and not for the number that backward() begins with (_ptx.py).
"""
from __future__ import annotations

import ctypes as c
import math
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import torch

from . import _cuda, _surroundings
from ._checks import check_no_gradient, no_gradient
from ._connection import Connection
from ._default import default_connection, for_cpu_tensors
from ._device import Where
from ._errors import KldMemoryError, KldTypeError, KldUnsupportedError, KldValueError, Status
from ._half import is_bounded, shift, wants_half
from ._library import DTYPE, ITEM_BYTES
from ._request import SHARE_BYTES_MIN, Call, Parameters, View, again, row_stride
from ._share import Attached

DTYPES: Dict[torch.dtype, str] = {torch.float32: "float32", torch.float64: "float64",
                                  torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ITEM_BYTES = {dtype: ITEM_BYTES[DTYPE[name]] for dtype, name in DTYPES.items()}
CPU = torch.device("cpu")  # whatever the default device is
NUMBER: Dict[torch.dtype, Any] = {torch.float32: c.c_float, torch.float64: c.c_double}
NO_SECOND_DERIVATIVE = ("kld's kl_div has no second derivative: call backward() or autograd.grad() without "
                        "create_graph=True")
SECOND_TIME = ("Trying to backward through kld's kl_div a second time: its gradient was handed over the first time. Specify "
               "retain_graph=True then")


def check_device(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise KldUnsupportedError(Status.UNIMPLEMENTED, f"{name} is a nested tensor; kld takes one with a shape, e.g. "
                                  "padded and with a row_mask")
    if tensor.layout != torch.strided or not (tensor.is_cpu or tensor.is_cuda):
        raise KldUnsupportedError(Status.UNIMPLEMENTED, f"{name} is a {tensor.layout} tensor on "
                                  f"{tensor.device}; kld takes strided tensors on the CPU or a CUDA device")


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise KldTypeError(Status.INVALID, f"{name} has dtype {tensor.dtype}; kld takes "
                           + ", ".join(str(dtype) for dtype in DTYPES))


def check(input: Any, target: Any) -> None:
    """Says what is wrong with these two."""
    for name, tensor in (("input", input), ("target", target)):
        if name == "target" and isinstance(tensor, Attached):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise KldTypeError(Status.INVALID, f"{name} is a tensor, not {type(tensor).__name__}")
        check_device(name, tensor)
        check_dtype(name, tensor)
    if tuple(input.shape) != tuple(target.shape):
        raise KldValueError(Status.INVALID, f"input has shape {tuple(input.shape)} and target "
                            f"{tuple(target.shape)}; they must be the same, nothing is broadcast")
    if isinstance(target, torch.Tensor) and input.device != target.device:
        raise KldValueError(Status.INVALID, f"input is on {input.device} and target on {target.device}; they must "
                            "be on one device")


def default_for(tensor: torch.Tensor) -> Connection:
    """That of a call which names none."""
    return default_connection(tensor.get_device()) if tensor.is_cuda else for_cpu_tensors(torch.get_num_threads())


def over(block: Any, dtype: torch.dtype, shape: Tuple[int, ...]) -> torch.Tensor:
    """A tensor over the first bytes of a buffer, which it keeps alive."""
    count = 1
    for size in shape:
        count *= size
    made: torch.Tensor = torch.frombuffer(block, dtype=dtype, count=count)
    return made if len(shape) == 1 else made.resize_(shape)  # not a view, which autograd lets nobody write to


def _empty(connection: Connection, shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """For a result: where Call.make() puts NumPy's. Under the connection's lock."""
    return make_empty(connection, shape, dtype, math.prod(shape) * _ITEM_BYTES[dtype])


def make_empty(connection: Connection, shape: Tuple[int, ...], dtype: torch.dtype, size: int) -> torch.Tensor:
    """The same, of a size that is known; ordinary memory where the server or this process lets us have no more."""
    if size >= SHARE_BYTES_MIN and not connection._memory.is_full:
        try:
            return over(connection._memory.take(size, connection._tidy), dtype, shape)
        except KldMemoryError:
            pass
    try:
        return torch.empty(shape, dtype=dtype, device=CPU)
    except RuntimeError:
        if size < SHARE_BYTES_MIN:
            raise
        raise KldMemoryError(Status.NO_MEMORY, f"no {size} bytes of memory for a result") from None


def _copy_to(block: Any, tensor: torch.Tensor) -> None:
    over(block, tensor.dtype, tuple(tensor.shape)).copy_(tensor)


def view_of(tensor: torch.Tensor, dtype: str) -> View:
    strides = None
    if not tensor.is_contiguous():
        item = tensor.element_size()
        strides = tuple(stride * item for stride in tensor.stride())
    return View(tensor.data_ptr(), dtype, tuple(tensor.shape), strides, tensor, _copy_to,
                tensor.get_device() if tensor.is_cuda else None)


def _tensor_of(name: str, value: Any, device: torch.device) -> torch.Tensor:
    try:  # on the CPU: no error is CUDA's
        tensor = value if hasattr(value, "__cuda_array_interface__") else torch.as_tensor(value, device=CPU)
    except (TypeError, ValueError, RuntimeError) as error:  # (a RuntimeError is of a type that PyTorch cannot guess)
        kind = KldValueError if isinstance(error, ValueError) else KldTypeError
        raise kind(Status.INVALID, f"{name} is a {type(value).__name__} that PyTorch makes no tensor of: {error}") from error
    return torch.as_tensor(tensor, device=device).clone()


def rows_vector(name: str, value: Any, leading: Tuple[int, ...], device: torch.device) -> Optional[torch.Tensor]:
    """row_mask or row_weights, as the request wants it."""
    if value is None:
        return None
    if torch.is_grad_enabled():
        check_no_gradient(name, value)
    # A copy of an array: backward() reads it, and nobody would see that it was written to.
    tensor = value.detach() if isinstance(value, torch.Tensor) else _tensor_of(name, value, device)
    _surroundings.refuse_special(tensor)
    check_device(name, tensor)
    tensor = tensor.resolve_neg()
    if tensor.device != device:
        raise KldValueError(Status.INVALID, f"{name} is on {tensor.device} and input on {device}; they must be on "
                            "one device")
    if name == "row_mask":
        if tensor.dtype not in (torch.bool, torch.uint8):
            raise KldTypeError(Status.INVALID, f"row_mask has dtype {tensor.dtype}; it is bool or uint8, and 0 "
                               "leaves a row out")
    elif tensor.is_complex():
        raise KldTypeError(Status.INVALID, f"{name} has dtype {tensor.dtype}; it holds real numbers")
    else:
        tensor = tensor.to(torch.float32)
    rows = 1
    for size in leading:
        rows *= size
    if tuple(tensor.shape) not in ((rows,), leading):
        raise KldValueError(Status.INVALID, f"{name} has shape {tuple(tensor.shape)}; expected {(rows,)}"
                            + (f" or {leading}" if leading != (rows,) else ""))
    return tensor.contiguous()


Tensors = Tuple[torch.Tensor, Any]  #: predictions and targets; these may be attached: a View


class Job(NamedTuple):
    """What a call of kl_div() asks for, predictions and targets aside."""

    connection: Connection
    parameters: Parameters
    row_weights: Optional[torch.Tensor] = None
    row_mask: Optional[torch.Tensor] = None
    timeout: Optional[float] = None

    def plan_gradients(self, dtypes: Sequence[Any], wanted: Sequence[bool], shape: Tuple[int, ...]) -> Tuple[bool, int]:
        """Whether they have to wait for what backward() brings; else k, so that they are to be written times 2^k."""
        parameters = self.parameters
        # With the reduction "none" a logit has a part in the losses of its whole row: what autograd will weigh them
        # with has to be known first.
        if parameters.reduction == "none" and "logits" in parameters[2:4]:
            return any(wanted), 0
        if not wants_half(dtypes, wanted):
            return False, 0
        bounded = is_bounded(parameters, wanted, self.row_weights is not None, self.row_mask is not None,
                             parameters.beta is not None, parameters.normalizer is not None)
        return not bounded, shift(parameters, shape) if bounded else 0

    def run(self, tensors: Tensors, wanted: Sequence[bool], grad_output: Optional[torch.Tensor] = None,
            shift: int = 0) -> Tuple[torch.Tensor, Tuple[Any, Any]]:
        """One request -> the loss, and the gradients that are wanted, times 2^shift."""
        if shift and self.parameters.reduction == "row":
            kinds = [one.dtype for one in tensors]
            double = torch.float64 in kinds or "float64" in kinds
            grad_output = torch.full(tensors[0].shape[:-1], 2.0**shift, device=tensors[0].device,
                                     dtype=torch.float64 if double else torch.float32)
        elif shift:
            return self._replace(parameters=self.parameters._replace(grad_output=2.0**shift)).run(tensors, wanted)
        if tensors[0].is_cuda:
            return self._run_on_gpu(tensors, wanted, grad_output)
        return self._run_on_cpu(tensors, wanted, grad_output)

    def _run_on_cpu(self, tensors: Tensors, wanted: Sequence[bool],
                    grad_output: Optional[torch.Tensor]) -> Tuple[torch.Tensor, Tuple[Any, Any]]:
        predictions, targets = tensors
        shape, kinds, reduction = predictions.shape, (predictions.dtype, targets.dtype), self.parameters.reduction
        dtype = torch.float64 if torch.float64 in kinds or "float64" in kinds else torch.float32
        connection, kind = self.connection, self._kind(tensors, wanted, grad_output)

        def request() -> Tuple[torch.Tensor, Tuple[Any, Any]]:
            first = _empty(connection, shape, kinds[0]) if wanted[0] else None
            second = _empty(connection, shape, kinds[1]) if wanted[1] else None
            if reduction == "none" or reduction == "row":
                loss = _empty(connection, shape if reduction == "none" else shape[:-1], dtype)
                self._ask(tensors, grad_output, first, second, loss, kind, None)
            else:
                loss = torch.empty((), dtype=dtype, device=CPU)
                self._ask(tensors, grad_output, first, second, None, kind, None)
                # An operator that does it takes some microseconds, behind a wait.
                NUMBER[dtype].from_address(loss.data_ptr()).value = connection._result.loss
            return loss, (first, second)

        return connection._alone(request, self.timeout)

    def _run_on_gpu(self, tensors: Tensors, wanted: Sequence[bool],
                    grad_output: Optional[torch.Tensor]) -> Tuple[torch.Tensor, Tuple[Any, Any]]:
        predictions, targets = tensors
        device, shape, kinds = predictions.device, tuple(predictions.shape), (predictions.dtype, targets.dtype)
        reduction = self.parameters.reduction
        loss = torch.empty(shape if reduction == "none" else shape[:-1] if reduction == "row" else (),
                           dtype=torch.float64 if torch.float64 in kinds or "float64" in kinds else torch.float32,
                           device=device)
        first = torch.empty(shape, dtype=kinds[0], device=device) if wanted[0] else None
        second = torch.empty(shape, dtype=kinds[1], device=device) if wanted[1] else None
        gpu = _cuda.gpu(predictions.get_device())
        connection, kind = self.connection, self._kind(tensors, wanted, grad_output)

        def request() -> None:
            where = Where(gpu, current_stream(gpu.ordinal), early=True)
            connection._devices().check(gpu)
            self._ask(tensors, grad_output, first, second, loss, kind, where)

        with gpu.current():
            connection._alone(request, self.timeout)
        return loss, (first, second)

    def _kind(self, tensors: Tensors, wanted: Sequence[bool], grad_output: Optional[torch.Tensor]) -> Any:
        """Equal for requests that are equal but for addresses; None where not all tensors are dense."""
        predictions, targets = tensors
        if isinstance(targets, View) or not predictions.is_contiguous() or not targets.is_contiguous():
            return None
        return (self.parameters, self.timeout, predictions.shape, predictions.dtype, targets.dtype, predictions.is_cuda,
                wanted[0], wanted[1], self.row_weights is None, None if self.row_mask is None else self.row_mask.dtype,
                None if grad_output is None else grad_output.dtype)

    def _ask(self, tensors: Tensors, grad_output: Optional[torch.Tensor], first: Optional[torch.Tensor],
             second: Optional[torch.Tensor], loss: Optional[torch.Tensor], kind: Any, where: Optional[Where]) -> None:
        """The request. Under the lock."""
        connection, shape = self.connection, tensors[0].shape
        plan = None if kind is None else connection.known(kind)
        if plan is not None:
            given = [*tensors]
            for tensor in (self.row_weights, self.row_mask, grad_output, first, second, loss):
                if tensor is not None:
                    given.append(tensor)
            outputs = (first is not None) + (second is not None) + (loss is not None)
            if (again(connection, plan, given, outputs) if where is None else
                    Call(connection, self.parameters, shape, self.timeout, where).again(plan, given)):
                return
        call = Call(connection, self.parameters, shape, self.timeout, where)
        self._inputs(call, tensors, grad_output)
        for slot, tensor in (("grad_predictions", first), ("grad_targets", second), ("loss", loss)):
            if tensor is not None:
                call.fresh_output(slot, view_of(tensor, DTYPES[tensor.dtype]))
        call.run()
        if kind is not None and call.is_plain:
            connection.remember(kind, call.plan)

    def _inputs(self, call: Call, tensors: Tensors, grad_output: Optional[torch.Tensor]) -> None:
        predictions, targets = tensors
        call.input("predictions", _strided(predictions))
        call.input("targets", targets if isinstance(targets, View) else _strided(targets))
        if self.row_weights is not None:
            call.vector("row_weights", view_of(self.row_weights, "float32"))
        if self.row_mask is not None:
            call.vector("row_mask", view_of(self.row_mask, "bool" if self.row_mask.dtype == torch.bool else "uint8"))
        if grad_output is not None:
            call.vector("grad_output", view_of(grad_output, DTYPES[grad_output.dtype]))


def _strided(tensor: torch.Tensor) -> View:
    """On a GPU PyTorch itself lays out anew what cannot be named."""
    if tensor.is_cuda and not tensor.is_contiguous() and not _has_rows(tensor):
        tensor = tensor.contiguous()
    return view_of(tensor, DTYPES[tensor.dtype])


def _has_rows(tensor: torch.Tensor) -> bool:
    return row_stride(view_of(tensor, DTYPES[tensor.dtype])) is not None


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(ordinal: int) -> int:
    if _raw_stream is not None:
        return int(_raw_stream(ordinal))
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


# PyTorch 1.13 does not say it: the gradient is handed over at once then, and a second backward pass asks for it again.
keeps_graph = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None)


def scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """gradient * factor in place, on a GPU; nothing is touched where the factor is 1."""
    gpu, factor = _cuda.gpu(gradient.get_device()), factor.resolve_neg()
    with gpu.current():
        gpu.scale(gradient.data_ptr(), DTYPES[gradient.dtype], gradient.numel(), factor.data_ptr(),
                  DTYPES[factor.dtype], current_stream(gpu.ordinal))
    return gradient


class KlDiv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, predictions: torch.Tensor, targets: Any, job: Job) -> torch.Tensor:
        wanted = ctx.needs_input_grad[:2]
        late, shift = False, 0
        if job.parameters.reduction == "none" or torch.float16 in (predictions.dtype, targets.dtype):
            late, shift = job.plan_gradients((predictions.dtype, targets.dtype), wanted, tuple(predictions.shape))
        attached = isinstance(targets, View)
        loss, gradients = job.run((predictions, targets), (False, False) if late else wanted, None, shift)
        ctx.job, ctx.gradients, ctx.late, ctx.shift = job, gradients, late, shift
        saved = []
        if late or keeps_graph is None:
            ctx.attached = targets if attached else None
            saved = [predictions] if attached else [predictions, targets]
            if job.row_weights is not None:
                saved.append(job.row_weights)
        if job.row_mask is not None:
            saved.append(job.row_mask)
        if saved:
            ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def given(ctx: Any, saved: Tuple[torch.Tensor, ...]) -> Tensors:
        """What forward() was given."""
        return saved[0].detach(), saved[1].detach() if ctx.attached is None else ctx.attached

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise KldUnsupportedError(Status.UNIMPLEMENTED, NO_SECOND_DERIVATIVE)
        grad_output, reduction = grad_outputs[0], ctx.job.parameters.reduction
        repeats = not ctx.late and ctx.gradients is None and keeps_graph is None
        # Once: checkpoint() unpacks no tensor twice. PyTorch refuses where its graph is gone, or a tensor was written to.
        saved = ctx.saved_tensors if ctx.late or repeats or ctx.job.row_mask is not None else ()
        if ctx.late:
            tensors = KlDiv.given(ctx, saved)
            if not _has_memory(grad_output):
                raise KldUnsupportedError(Status.UNIMPLEMENTED, "a batch of grad_outputs (is_grads_batched) for the "
                                          "reduction \"none\" of logits, or a float16 gradient without a bound; "
                                          "expected one at a time")
            _, gradients = ctx.job.run(tensors, ctx.needs_input_grad[:2], grad_output.resolve_neg().contiguous())
            return (*gradients, None)
        gradients, kept = ctx.gradients, keeps_graph is not None and keeps_graph()
        if repeats:
            _, gradients = ctx.job.run(KlDiv.given(ctx, saved), ctx.needs_input_grad[:2], None, ctx.shift)
        if gradients is None:
            raise RuntimeError(SECOND_TIME)
        if not kept:
            ctx.gradients = None  # autograd keeps them: no copy
        if reduction in ("none", "row"):
            grad_output = without_masked(grad_output, ctx.job.row_mask, reduction)
        made = [one if one is None else times(one, grad_output, reduction, kept, ctx.shift) for one in gradients]
        if reduction not in ("none", "row") and ctx.job.row_mask is not None and _is_bad_number(grad_output):
            made = [one if one is None else _left_out(one, ctx.job.row_mask) for one in made]
        return (*made, None)


def loss_alone(predictions: torch.Tensor, targets: Any, job: Job) -> torch.Tensor:
    """KlDiv.apply() where no gradient is wanted."""
    return job.run((predictions, targets), (False, False))[0]


def _has_memory(tensor: torch.Tensor) -> bool:
    """False: many in one (autograd.grad(is_grads_batched=True)), which only PyTorch itself can multiply with."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def number_of(factor: torch.Tensor) -> Optional[float]:
    """Of a scalar on the CPU; None: many in one."""
    kind = NUMBER.get(factor.dtype)
    try:
        if kind is not None and factor.is_cpu and not factor.is_neg():
            address = factor.data_ptr()
            if address:  # an operator that reads it takes some microseconds, behind other work
                value: float = kind.from_address(address).value
                return value
        return float(factor)
    except RuntimeError:
        return None


def without_masked(grad_output: torch.Tensor, row_mask: Optional[torch.Tensor], reduction: str) -> torch.Tensor:
    """0 for the rows that are left out, whatever backward brings for their losses: sqrt() brings inf for those of 0."""
    if row_mask is None:
        return grad_output
    rows = grad_output.shape[:-1] if reduction == "none" else grad_output.shape
    out = row_mask.to(grad_output.device).reshape(rows) == 0
    return grad_output.masked_fill(out.unsqueeze(-1) if reduction == "none" else out, 0)


def _is_bad_number(factor: torch.Tensor) -> bool:
    """inf or NaN. On a GPU nobody waits to know."""
    number = number_of(factor) if factor.is_cpu else None
    return number is not None and not math.isfinite(number)


def _left_out(gradient: torch.Tensor, row_mask: torch.Tensor) -> torch.Tensor:
    return gradient.masked_fill((row_mask.reshape(gradient.shape[:-1]) == 0).unsqueeze(-1), 0)


def times(gradient: torch.Tensor, factor: torch.Tensor, reduction: str, kept: bool, shift: int) -> torch.Tensor:
    """gradient * factor / 2^shift"""
    if reduction == "row":
        factor = factor.unsqueeze(-1)
    elif reduction != "none" and gradient.is_cuda:
        if _has_memory(factor):
            return scaled(gradient.clone() if kept else gradient, factor * 2.0**-shift if shift else factor)
    elif reduction != "none":
        number = number_of(factor)
        if number is not None:
            if shift:
                number *= 2.0**-shift
            if number == 1:
                return gradient.clone() if kept else gradient  # whoever gets it may write to it
            if gradient.dtype in _NARROW:  # the number may not fit
                return gradient.to(torch.float32).mul_(number).to(gradient.dtype)
            return gradient * number if kept else gradient.mul_(number)
    if shift:
        return (gradient.to(torch.float32) * (factor * 2.0**-shift)).to(gradient.dtype)
    made = gradient * factor
    return made.to(gradient.dtype)


_NARROW = (torch.float16, torch.bfloat16)


__all__ = ["CPU", "DTYPES", "Job", "KlDiv", "NUMBER", "check", "check_device", "check_dtype", "default_for", "keeps_graph",
           "loss_alone", "make_empty", "no_gradient", "number_of", "over", "rows_vector", "scaled", "times", "without_masked"]
