"""kl_div() under torch.compile(): two custom operators with fake kernels, so that a graph goes through it whole.
What they do is a Job of _autograd.py's. Their backward multiplies in the graph, where the compiler may fuse
it. PyTorch 2.4 or newer; with an older one nothing is ever compiled here.

A connection is known to a graph by its number (Connection.number), -1 for the default one.
"""
from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch

from . import _autograd
from ._connection import Connection
from ._default import default_connection
from ._errors import KldConnectionError, KldValueError, Status
from ._request import Parameters, check_number

Tensor = torch.Tensor
IS_SUPPORTED = hasattr(torch, "library") and hasattr(torch.library, "custom_op")

if IS_SUPPORTED:
    is_compiling = torch.compiler.is_compiling
else:
    def is_compiling() -> bool:
        return False


def _job(like: Tensor, row_weights: Optional[Tensor], row_mask: Optional[Tensor],
         scale: Optional[Tensor], normalizer: Optional[Tensor], texts: List[str], numbers: List[float],
         connection: int, timeout: float) -> _autograd.Job:
    used = (default_connection(like.get_device() if like.is_cuda else None) if connection < 0
            else Connection.by_number(connection))
    if used is None:
        raise KldConnectionError(Status.UNAVAILABLE, "the connection of this compiled graph is gone")
    leading = tuple(like.shape[:-1])
    given = (None if number != number else number for number in numbers)
    parameters = Parameters(*(*texts, *given))._replace(  # type: ignore[arg-type]
        scale=None if scale is None else scale.item(), normalizer=None if normalizer is None else normalizer.item())
    return _autograd.Job(used, parameters,
                         _autograd.rows_vector("row_weights", row_weights, leading, like.device),
                         _autograd.rows_vector("row_mask", row_mask, leading, like.device),
                         None if timeout < 0 else timeout)


def _loss_like(input: Tensor, target: Tensor, reduction: str) -> Tensor:
    double = torch.float64 in (input.dtype, target.dtype)
    shape = input.shape if reduction == "none" else input.shape[:-1] if reduction == "row" else ()
    return input.new_empty(shape, dtype=torch.float64 if double else torch.float32)


def _loss(input: Tensor, target: Tensor, row_weights: Optional[Tensor], row_mask: Optional[Tensor],
          scale: Optional[Tensor], normalizer: Optional[Tensor], texts: List[str], numbers: List[float],
          wanted: List[bool], connection: int, timeout: float) -> Tuple[Tensor, Tensor, Tensor]:
    for name, tensor in (("input", input), ("target", target)):
        _autograd.check_dtype(name, tensor)
    job = _job(input, row_weights, row_mask, scale, normalizer, texts, numbers, connection, timeout)
    loss, gradients = job.run((input, target), wanted)
    first, second = (input.new_empty(0) if one is None else one for one in gradients)
    return loss, first, second


def _loss_fake(input: Tensor, target: Tensor, row_weights: Optional[Tensor], row_mask: Optional[Tensor],
               scale: Optional[Tensor], normalizer: Optional[Tensor], texts: List[str], numbers: List[float],
               wanted: List[bool], connection: int, timeout: float) -> Tuple[Tensor, Tensor, Tensor]:
    if input.shape != target.shape:
        raise KldValueError(Status.INVALID, f"input has shape {tuple(input.shape)} and target "
                            f"{tuple(target.shape)}; they must be the same, nothing is broadcast")
    # Always row-major, as the real ones.
    return (_loss_like(input, target, texts[1]),
            input.new_empty(input.shape) if wanted[0] else input.new_empty(0),
            target.new_empty(target.shape) if wanted[1] else input.new_empty(0))


def _late(input: Tensor, target: Tensor, grad_output: Tensor, row_weights: Optional[Tensor],
          row_mask: Optional[Tensor], scale: Optional[Tensor], normalizer: Optional[Tensor],
          texts: List[str], numbers: List[float], wanted: List[bool], connection: int,
          timeout: float) -> Tuple[Tensor, Tensor]:
    """The gradients for a grad_output that is known."""
    job = _job(input, row_weights, row_mask, scale, normalizer, texts, numbers, connection, timeout)
    _, (first, second) = job.run((input, target), wanted, grad_output.contiguous())
    return (input.new_empty(0) if first is None else first, input.new_empty(0) if second is None else second)


def _late_fake(input: Tensor, target: Tensor, grad_output: Tensor, row_weights: Optional[Tensor],
               row_mask: Optional[Tensor], scale: Optional[Tensor], normalizer: Optional[Tensor],
               texts: List[str], numbers: List[float], wanted: List[bool], connection: int,
               timeout: float) -> Tuple[Tensor, Tensor]:
    return (input.new_empty(input.shape) if wanted[0] else input.new_empty(0),
            target.new_empty(target.shape) if wanted[1] else input.new_empty(0))


# What may be another number at each step is a tensor: Dynamo makes a graph for each value of a plain one.
_LAST = ", Tensor? row_weights, Tensor? row_mask, Tensor? scale, Tensor? normalizer, str[] texts, " \
        "float[] numbers, bool[] wanted, SymInt connection, float timeout)"

if IS_SUPPORTED:
    _loss_op: Any = torch.library.custom_op(
        "kld::loss", _loss, mutates_args=(),
        schema="(Tensor input, Tensor target" + _LAST + " -> (Tensor, Tensor, Tensor)")
    _late_op: Any = torch.library.custom_op(
        "kld::late_gradients", _late, mutates_args=(),
        schema="(Tensor input, Tensor target, Tensor grad_output" + _LAST + " -> (Tensor, Tensor)")

    def _setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.late, ctx.wanted = None, ctx.needs_input_grad[:2]
        ctx.rows = inputs[6][1] == "row"
        ctx.set_materialize_grads(False)
        if not any(inputs[8]) and any(ctx.wanted):
            ctx.late = inputs[6:8], inputs[9:]
            ctx.save_for_backward(*inputs[:6])
        else:
            ctx.save_for_backward(*output[1:])

    def _backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        if ctx.late is not None:
            input, target, *more = ctx.saved_tensors
            gradients = _late_op(input, target, grad_output, *more, *ctx.late[0], list(ctx.wanted), *ctx.late[1])
        else:
            factor = grad_output.unsqueeze(-1) if ctx.rows else grad_output
            # Not in 16 bits, which the factor may not fit.
            gradients = [(one.to(torch.promote_types(one.dtype, torch.float32)) * factor).to(one.dtype) if want else None
                         for one, want in zip(ctx.saved_tensors, ctx.wanted)]
        return (*(one if want else None for one, want in zip(gradients, ctx.wanted)), *([None] * 9))

    _loss_op.register_fake(_loss_fake)
    _late_op.register_fake(_late_fake)
    _loss_op.register_autograd(_backward, setup_context=_setup)


def kl_div(input: Tensor, target: Tensor, parameters: Parameters, row_weights: Optional[Tensor],
           row_mask: Optional[Tensor], connection: Optional[Connection], timeout: Optional[float]) -> Tensor:
    """Traced; what is wrong with the arguments is said when the graph runs."""
    if input.dim() == 0:
        return kl_div(input.reshape(1), target.reshape(1), parameters, row_weights, row_mask, connection,
                      timeout).reshape(())
    nan = float("nan")
    divergence, reduction, input_form, target_form = parameters[:4]
    scale, normalizer = (None if number is None else
                         torch.ones((), dtype=torch.float64, device="cpu") * check_number(name, number)
                         for name, number in (("scale", parameters.scale), ("normalizer", parameters.normalizer)))
    numbers = [nan if number is None else float(number)
               for number in parameters._replace(scale=None, normalizer=None)[4:]]
    grad = torch.is_grad_enabled()
    late = reduction == "none" and "logits" in (input_form, target_form)
    wanted = [grad and input.requires_grad and not late, grad and target.requires_grad and not late]
    loss: Tensor = _loss_op(input, target, row_weights, row_mask,
                            scale, normalizer, [divergence, reduction, input_form, target_form], numbers, wanted,
                            -1 if connection is None else connection.number, -1.0 if timeout is None else timeout)[0]
    return loss


__all__ = ["IS_SUPPORTED", "is_compiling", "kl_div"]
