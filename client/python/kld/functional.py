"""PyTorch's side: torch.nn.functional.kl_div over kld, with autograd. Needs torch; CPU tensors.

The forward pass is one request that gives the loss and the gradients that autograd wants; the backward
pass multiplies. Any thread; requests of one connection take turns.
"""
from __future__ import annotations

import warnings
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Union

try:
    import torch
except ImportError as error:
    raise ImportError("kld.functional and kld.nn are for PyTorch, which is not here: pip install torch; "
                      "without it, kld.kl_div() takes NumPy arrays") from error

from ._connection import Connection
from ._default import default_connection
from ._errors import KldTypeError, KldUnsupportedError, KldValueError, Status
from ._request import Call, Parameters, View

DTYPES: Dict[torch.dtype, str] = {torch.float32: "float32", torch.float64: "float64",
                                  torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _check_cpu(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise KldUnsupportedError(Status.UNIMPLEMENTED, f"{name} is a {tensor.layout} tensor on "
                                  f"{tensor.device}; this package takes strided tensors on the CPU")


def _copy_to(block: Any, tensor: torch.Tensor) -> None:
    _over(block, tensor.dtype, tuple(tensor.shape)).copy_(tensor)


def _over(block: Any, dtype: torch.dtype, shape: Tuple[int, ...]) -> torch.Tensor:
    """A tensor over the first bytes of a buffer, which it keeps alive."""
    count = 1
    for size in shape:
        count *= size
    made: torch.Tensor = torch.frombuffer(block, dtype=dtype, count=count).view(shape)
    return made


def _view(tensor: torch.Tensor, dtype: str, shape: Optional[Tuple[int, ...]] = None) -> View:
    item = tensor.element_size()
    return View(tensor.data_ptr(), dtype, tuple(tensor.shape) if shape is None else shape,
                tuple(stride * item for stride in tensor.stride()), tensor, _copy_to)


def _rows_vector(name: str, value: Any, leading: Tuple[int, ...]) -> Optional[View]:
    if value is None:
        return None
    tensor = torch.as_tensor(value).detach()
    _check_cpu(name, tensor)
    if name == "row_mask":
        if tensor.dtype not in (torch.bool, torch.uint8):
            raise KldTypeError(Status.INVALID, f"row_mask has dtype {tensor.dtype}; it is bool or uint8, and 0 "
                               "leaves a row out")
        dtype = "bool" if tensor.dtype == torch.bool else "uint8"
    else:
        tensor, dtype = tensor.to(torch.float32), "float32"
    rows = 1
    for size in leading:
        rows *= size
    if tuple(tensor.shape) not in ((rows,), leading):
        raise KldValueError(Status.INVALID, f"{name} has shape {tuple(tensor.shape)}; expected {(rows,)}"
                            + (f" or {leading}" if leading != (rows,) else ""))
    return _view(tensor.contiguous(), dtype)


class _Job(NamedTuple):
    """What a call of kl_div() asks for, tensors aside."""

    connection: Connection
    parameters: Parameters
    row_weights: Optional[View]
    row_mask: Optional[View]
    timeout: Optional[float]

    def run(self, tensors: Tuple[torch.Tensor, torch.Tensor], wanted: Sequence[bool],
            grad_output: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, Tuple[Any, Any]]:
        """One request -> the loss, and the gradients that are wanted."""
        shape = tuple(tensors[0].shape)
        double = torch.float64 in (tensors[0].dtype, tensors[1].dtype)
        dtype = torch.float64 if double else torch.float32
        loss_shape = {"none": shape, "row": shape[:-1]}.get(self.parameters.reduction)
        gradients, loss = [], None
        with self.connection._used():
            call = Call(self.connection, self.parameters, shape, self.timeout)
            for slot, tensor in zip(("predictions", "targets"), tensors):
                call.input(slot, _view(tensor, DTYPES[tensor.dtype]))
            for slot, view in (("row_weights", self.row_weights), ("row_mask", self.row_mask)):
                if view is not None:
                    call.vector(slot, view)
            if grad_output is not None:
                call.vector("grad_output", _view(grad_output, DTYPES[grad_output.dtype]))
            for slot, tensor, want in zip(("grad_predictions", "grad_targets"), tensors, wanted):
                gradients.append(_over(call.make(slot, DTYPES[tensor.dtype], shape), tensor.dtype, shape)
                                 if want else None)
            if loss_shape is not None:
                loss = _over(call.make("loss", DTYPES[dtype], loss_shape), dtype, loss_shape)
            result = call.run()
        if loss is None:
            loss = torch.tensor(result.loss, dtype=dtype)
        return loss, (gradients[0], gradients[1])


class _KlDiv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, predictions: torch.Tensor, targets: torch.Tensor, job: _Job) -> torch.Tensor:
        wanted = ctx.needs_input_grad[:2]
        tensors = predictions.detach(), targets.detach()
        # With the reduction "none" a logit has a part in the losses of its whole row: what autograd will
        # weigh them with has to be known first.
        late = any(wanted) and job.parameters.reduction == "none" and "logits" in job.parameters[2:4]
        loss, gradients = job.run(tensors, (False, False) if late else wanted)
        ctx.job, ctx.gradients = job, gradients
        if late:
            ctx.save_for_backward(predictions, targets)
        ctx.late = late
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise KldUnsupportedError(Status.UNIMPLEMENTED, "kld's kl_div has no second derivative: call backward() "
                                      "or autograd.grad() without create_graph=True")
        grad_output = grad_outputs[0]
        if ctx.late:
            saved = ctx.saved_tensors
            _, gradients = ctx.job.run((saved[0].detach(), saved[1].detach()), ctx.needs_input_grad[:2],
                                       grad_output.contiguous())
            return (*gradients, None)
        if grad_output.dim() == 0 and ctx.job.parameters.reduction != "none":
            factor = float(grad_output)
            return (*(one if one is None or factor == 1 else one * factor for one in ctx.gradients), None)
        if ctx.job.parameters.reduction == "row":
            grad_output = grad_output.unsqueeze(-1)
        return (*(one if one is None else (one * grad_output).to(one.dtype) for one in ctx.gradients), None)


def _legacy_reduction(size_average: Optional[bool], reduce: Optional[bool]) -> str:
    """What PyTorch's deprecated arguments mean."""
    average, reduced = size_average is not False, reduce is not False
    text = "mean" if average and reduced else "sum" if reduced else "none"
    warnings.warn(f"size_average and reduce are deprecated, use reduction={text!r}", stacklevel=3)
    return text


def kl_div(input: torch.Tensor, target: torch.Tensor, size_average: Optional[bool] = None,
           reduce: Optional[bool] = None, reduction: str = "mean", log_target: bool = False, *,
           divergence: str = "forward_kl", input_form: str = "logprobs", target_form: Optional[str] = None,
           temperature: Optional[float] = None, beta: Optional[float] = None, skew: Optional[float] = None,
           weight: Optional[float] = None, scale: Optional[float] = None,
           normalizer: Optional[float] = None, row_weights: Any = None, row_mask: Any = None,
           connection: Optional[Connection] = None, timeout: Optional[float] = None) -> torch.Tensor:
    """torch.nn.functional.kl_div(), computed by kld; the first six arguments are PyTorch's.

    input holds log-probabilities, target probabilities, or log-probabilities with log_target=True;
    input_form and target_form ("probs", "logprobs", "logits") say otherwise. reduction: "mean" (over all
    elements), "batchmean", "sum", "none", and kld's "row", "rowmean". The others are kld's, as in
    Connection.kl_div(). Without a connection: kld.default_connection().

    Different from PyTorch: shapes must be equal; 0 log 0 is 0 also with log_target=True; the loss of
    float16 and bfloat16 inputs is float32, as under autocast.
    """
    for name, tensor in (("input", input), ("target", target)):
        if not isinstance(tensor, torch.Tensor):
            raise KldTypeError(Status.INVALID, f"{name} is a tensor, not {type(tensor).__name__}")
        _check_cpu(name, tensor)
        if tensor.dtype not in DTYPES:
            raise KldTypeError(Status.INVALID, f"{name} has dtype {tensor.dtype}; kld takes "
                               + ", ".join(str(dtype) for dtype in DTYPES))
    if input.shape != target.shape:
        raise KldValueError(Status.INVALID, f"input has shape {tuple(input.shape)} and target "
                            f"{tuple(target.shape)}; they must be the same, nothing is broadcast")
    if size_average is not None or reduce is not None:
        reduction = _legacy_reduction(size_average, reduce)
    if target_form is None:
        target_form = "logprobs" if log_target else "probs"
    elif log_target and target_form != "logprobs":
        raise KldValueError(Status.INVALID, f"log_target=True and target_form={target_form!r} contradict each other")
    single = input.dim() == 0 and reduction in ("mean", "sum", "none")
    if single:
        input, target = input.reshape(1), target.reshape(1)
    leading = tuple(input.shape[:-1])
    job = _Job(default_connection() if connection is None else connection,
               Parameters(divergence, reduction, input_form, target_form, temperature, beta, skew, weight,
                          scale, normalizer),
               _rows_vector("row_weights", row_weights, leading), _rows_vector("row_mask", row_mask, leading),
               timeout)
    loss: torch.Tensor = _KlDiv.apply(input, target, job)
    return loss.reshape(()) if single else loss


def empty(*shape: Union[int, Sequence[int]], dtype: torch.dtype = torch.float32,
          connection: Optional[Connection] = None, requires_grad: bool = False) -> torch.Tensor:
    """torch.empty() in memory that the server shares: kl_div() uses it without a copy. It may outlive the
    connection."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    made = tuple(int(size) for size in sizes)  # type: ignore[arg-type]
    if dtype not in DTYPES:
        raise KldTypeError(Status.INVALID, f"dtype {dtype}; kld takes " + ", ".join(map(str, DTYPES)))
    if any(size < 1 for size in made):
        raise KldValueError(Status.INVALID, f"shape {made}; each dimension is at least 1")
    used = default_connection() if connection is None else connection
    size = torch.empty((), dtype=dtype).element_size()
    for dimension in made:
        size *= dimension
    with used._used():
        block = used._memory.take(size, used._tidy)
    tensor = _over(block, dtype, made)
    tensor.requires_grad_(requires_grad)
    return tensor


__all__ = ["empty", "kl_div"]
