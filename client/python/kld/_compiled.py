"""kl_div() as custom operators with fake kernels, for what sees operators and not memory: torch.compile() and
torch.export(), whose graphs they go through whole, FakeTensors, dispatch modes. What they do is a Job of
_autograd.py's. Their backward multiplies in the graph, where the compiler may fuse it. PyTorch 2.4 or newer.

A connection is known to a graph by its number (Connection.number), -1 for the default one.
"""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from . import _autograd
from ._connection import Connection
from ._errors import KldConnectionError, KldTypeError, KldUnsupportedError, KldValueError, Status
from ._half import is_bounded, wants_half
from ._request import Parameters
from ._surroundings import HAS_OPERATORS, is_special, name_of

TEXTS = 4  # of Parameters; a fifth and sixth say what is wrong

if HAS_OPERATORS:
    is_compiling = torch.compiler.is_compiling
else:
    def is_compiling() -> bool:
        return False


class _Rest(NamedTuple):
    """Arguments of an operator behind its tensors."""

    row_weights: Optional[Tensor]
    row_mask: Optional[Tensor]
    numbers: Optional[Tensor]
    texts: List[str]
    names: List[str]  #: of the numbers
    wanted: List[bool]
    connection: int

    def job(self, like: Tensor) -> _autograd.Job:
        used = _autograd.default_for(like) if self.connection < 0 else Connection.by_number(self.connection)
        if used is None:
            raise KldConnectionError(Status.UNAVAILABLE, "the connection of this compiled graph is gone")
        leading = tuple(like.shape[:-1])
        given = {} if self.numbers is None else dict(zip(self.names, self.numbers.tolist()))
        timeout = given.pop("timeout", None)
        return _autograd.Job(used, Parameters(*self.texts[:TEXTS], **given),  # type: ignore[arg-type]
                             _autograd.rows_vector("row_weights", self.row_weights, leading, like.device),
                             _autograd.rows_vector("row_mask", self.row_mask, leading, like.device), timeout)

    def check(self, input: Tensor, target: Tensor) -> None:
        """As for a call outside of graphs, and with its errors: those that tracing found are in the texts."""
        if len(self.texts) > TEXTS:
            kind = KldTypeError if self.texts[TEXTS] == "type" else KldValueError
            raise kind(Status.INVALID, self.texts[TEXTS + 1])
        _autograd.check(input, target)

    def is_shifted(self, input: Tensor, target: Tensor) -> bool:
        return wants_half((input.dtype, target.dtype), self.wanted) and is_bounded(
            self.texts, self.wanted, self.row_weights is not None, self.row_mask is not None, "beta" in self.names,
            "normalizer" in self.names)


_SCHEMA = ", Tensor? row_weights, Tensor? row_mask, Tensor? numbers, str[] texts, str[] names, bool[] wanted, " \
          "SymInt connection)"


def _loss(input: Tensor, target: Tensor, *rest: Any) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, the gradients, and what they are to be multiplied with, where that is not 1."""
    asked = _Rest(*rest)
    asked.check(input, target)
    job, shift = asked.job(input), 0
    if asked.is_shifted(input, target):
        _, shift = job.plan_gradients((input.dtype, target.dtype), asked.wanted, tuple(input.shape))
        unit = input.new_full((), 2.0**-shift, dtype=torch.float32)
    else:
        unit = input.new_empty(0, dtype=torch.float32)
    loss, gradients = job.run((input, target), asked.wanted, None, shift)
    first, second = (input.new_empty(0) if one is None else one for one in gradients)
    return loss, first, second, unit


def _loss_fake(input: Tensor, target: Tensor, *rest: Any) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes what _loss() refuses: that is said when the graph runs."""
    asked = _Rest(*rest)
    if not is_special(input):  # run, and not traced: a tensor is on the device "meta", which is refused
        asked.check(input, target)
        asked.job(input)
    reduction, double = asked.texts[1], torch.float64 in (input.dtype, target.dtype)
    shape = input.shape if reduction == "none" else input.shape[:-1] if reduction == "row" else ()
    loss = input.new_empty(shape, dtype=torch.float64 if double else torch.float32)
    unit = input.new_empty(() if asked.is_shifted(input, target) else 0, dtype=torch.float32)
    return (loss, *_gradients_fake(input, target, asked.wanted), unit)


def _gradients_fake(input: Tensor, target: Tensor, wanted: List[bool]) -> Tuple[Tensor, Tensor]:
    """Always row-major, as the real ones."""
    return (input.new_empty(input.shape) if wanted[0] else input.new_empty(0),
            target.new_empty(target.shape) if wanted[1] else input.new_empty(0))


def _late(input: Tensor, target: Tensor, grad_output: Tensor, *rest: Any) -> Tuple[Tensor, Tensor]:
    """The gradients for a grad_output that is known."""
    asked = _Rest(*rest)
    _, (first, second) = asked.job(input).run((input, target), asked.wanted, grad_output.resolve_neg().contiguous())
    return (input.new_empty(0) if first is None else first, input.new_empty(0) if second is None else second)


def _late_fake(input: Tensor, target: Tensor, grad_output: Tensor, *rest: Any) -> Tuple[Tensor, Tensor]:
    return _gradients_fake(input, target, _Rest(*rest).wanted)


def _refuse_second() -> None:
    if torch.is_grad_enabled():
        raise KldUnsupportedError(Status.UNIMPLEMENTED, _autograd.NO_SECOND_DERIVATIVE)


def _once(grad_output: Tensor) -> Tensor:
    """Goes on with what backward() begins with, unless it is to be differentiated again. (In the graph of a
    backward pass nothing else is run when it is. Of newer PyTorch, 2.15 for one, such a graph is run without gradients
    then, and PyTorch refuses when the result is differentiated.)"""
    _refuse_second()
    return grad_output.clone()


# Numbers travel in a tensor, since they may be others at each step: Dynamo makes a graph for each value of a plain one.
# None of that is left to Inductor to compute: it would call a C++ compiler for it.

def _number(value: Any) -> Tensor:
    """A float64 scalar. It is taken apart when a graph is lowered, where it is known whether the number may change."""
    if isinstance(value, torch.SymFloat):
        return torch.ones((), dtype=torch.float64, device="cpu") * value  # which PyTorch makes an input of the graph
    made: Tensor = _integer_op(value) if isinstance(value, torch.SymInt) else _constant_op(float(value))
    return made


def _constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _integer(value: int) -> Tensor:
    return _constant(float(value))


def _scalar_fake(value: Any) -> Tensor:
    return torch.empty((), dtype=torch.float64, device="cpu")


def _numbers(values: List[Tensor]) -> Tensor:
    return torch.stack([value.to("cpu", torch.float64) for value in values])


def _numbers_fake(values: List[Tensor]) -> Tensor:
    return torch.empty(len(values), dtype=torch.float64, device="cpu")


# Not part of a CUDA graph, which mode="reduce-overhead" makes of the rest. (PyTorch 2.8 knows the tag.)
_TAGS: Dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch, "Tag") and hasattr(
    torch.Tag, "cudagraph_unsafe") else {}
_UNFOLDED: Dict[str, Any] = {"tags": (torch.Tag.nondeterministic_seeded,)} if HAS_OPERATORS and (
    torch.__version__ < (2, 5)) else _TAGS


def _define(name: str, function: Any, fake: Any, schema: str) -> Any:
    made = torch.library.custom_op(name, function, mutates_args=(), schema=schema, **_TAGS)
    made.register_fake(fake)
    return made


if HAS_OPERATORS:
    _loss_op: Any = _define("kld::loss", _loss, _loss_fake,
                            "(Tensor input, Tensor target" + _SCHEMA + " -> (Tensor, Tensor, Tensor, Tensor)")
    _late_op: Any = _define("kld::late_gradients", _late, _late_fake,
                            "(Tensor input, Tensor target, Tensor grad_output" + _SCHEMA + " -> (Tensor, Tensor)")
    _integer_op: Any = _define("kld::integer", _integer, _scalar_fake, "(SymInt value) -> Tensor")
    _numbers_op: Any = _define("kld::numbers", _numbers, _numbers_fake, "(Tensor[] values) -> Tensor")
    _library = torch.library.Library("kld", "FRAGMENT")
    # PyTorch 2.4's Inductor runs an operator of constants itself, and compiles C++ that fills in what came out; not one
    # with this tag.
    _library.define("constant(float value) -> Tensor", **_UNFOLDED)
    _library.impl("constant", _constant, "CompositeExplicitAutograd")
    torch.library.register_fake("kld::constant", _scalar_fake, lib=_library)
    _constant_op: Any = torch.ops.kld.constant.default
    _library.define("number(Scalar value) -> Tensor")
    _library.impl("number", _number, "CompositeImplicitAutograd")
    # Not a custom_op(), inside of which PyTorch 2.4 never has gradients enabled.
    _library.define("once(Tensor grad_output) -> Tensor", **_TAGS)
    _library.impl("once", _once, "CompositeExplicitAutograd")
    torch.library.register_fake("kld::once", torch.empty_like, lib=_library)
    _once_op: Any = torch.ops.kld.once.default

    def _setup(ctx: Any, inputs: Any, output: Any) -> None:
        asked = _Rest(*inputs[2:])
        ctx.late, ctx.wanted, ctx.rows = None, list(ctx.needs_input_grad[:2]), asked.texts[1] == "row"
        ctx.shifted = asked.is_shifted(*inputs[:2])
        ctx.set_materialize_grads(False)
        if not any(asked.wanted) and any(ctx.wanted):
            ctx.late = asked.texts, asked.names, ctx.wanted, asked.connection
            ctx.save_for_backward(*inputs[:2], *asked[:3])
        else:
            ctx.save_for_backward(*output[1:], asked.row_mask)

    def _backward(ctx: Any, grad_output: Optional[Tensor], *_: Any) -> Any:
        gradients: Any = (None, None)
        _refuse_second()
        if grad_output is not None:
            factor = _once_op(grad_output)
            if ctx.late is not None:
                input, target, *more = ctx.saved_tensors
                gradients = _late_op(input, target, factor, *more, *ctx.late)
            else:
                *made, unit, row_mask = ctx.saved_tensors
                factor = factor * unit if ctx.shifted else factor
                factor = factor.unsqueeze(-1) if ctx.rows else factor
                # Not in 16 bits, which the factor may not fit.
                gradients = [(one.to(torch.promote_types(one.dtype, torch.float32)) * factor).to(one.dtype)
                             if want else None for one, want in zip(made, ctx.wanted)]
                if row_mask is not None:  # 0, whatever the factor is
                    gradients = [None if one is None else one.masked_fill(
                        (row_mask.reshape(one.shape[:-1]) == 0).unsqueeze(-1), 0) for one in gradients]
        return (*(one if want else None for one, want in zip(gradients, ctx.wanted)), *([None] * len(_Rest._fields)))

    _loss_op.register_autograd(_backward, setup_context=_setup)


def _problem(given: Dict[str, Any], texts: Tuple[Any, ...], log_target: bool, row_weights: Any) -> List[str]:
    """What a call outside of graphs would refuse, and an operator cannot see."""
    for name, text in zip(Parameters._fields, texts):
        if not isinstance(text, str):
            return ["type", f"{name} is a text, not {name_of(type(text))}"]
    if not isinstance(log_target, bool):
        return ["type", f"log_target is a bool, not {name_of(type(log_target))}"]
    for name, value in given.items():
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            return ["value", _autograd.no_gradient(name)]
        if isinstance(value, (Tensor, np.ndarray)) and value.shape != ():
            return ["type", f"{name} is a number, not of shape {tuple(value.shape)}"]
        if not isinstance(value, (Tensor, np.ndarray, np.generic, int, float)):
            return ["type", f"{name} is a number, not {name_of(type(value))}"]
    if log_target and texts[3] != "logprobs":
        return ["value", f"log_target=True and target_form={texts[3]!r} contradict each other"]
    if isinstance(row_weights, Tensor) and row_weights.requires_grad and torch.is_grad_enabled():
        return ["value", _autograd.no_gradient("row_weights")]
    return []


def _scalar(value: Any) -> Tensor:
    """In the graph."""
    if isinstance(value, Tensor):
        return value.detach()  # as_tensor() would move it to torch.set_default_device()'s
    made: Tensor = (torch.as_tensor(value, device="cpu") if isinstance(value, (np.ndarray, np.generic)) else
                    torch.ops.kld.number(value))
    return made


def vector(value: Any, like: Tensor) -> Optional[Tensor]:
    """Of an array a copy, as in _autograd.rows_vector()."""
    return value if value is None or isinstance(value, Tensor) else torch.as_tensor(value, device=like.device).clone()


def kl_div(input: Tensor, target: Tensor, parameters: Parameters, log_target: bool, row_weights: Any,
           row_mask: Any, connection: Optional[Connection], timeout: Optional[float]) -> Tensor:
    """Often traced; what is wrong with the arguments is said when the graph runs, in the words that it is said in
    elsewhere."""
    reduction = parameters.reduction
    if input.dim() == 0 and reduction in ("mean", "batchmean", "sum", "none") and target.dim() == 0:
        return kl_div(input.reshape(1), target.reshape(1), parameters, log_target, row_weights, row_mask,
                      connection, timeout).reshape(())
    plain = tuple(parameters)  # PyTorch 2.6 cannot trace a slice of a NamedTuple
    names, values = (*Parameters._fields[TEXTS:], "timeout"), (*plain[TEXTS:], timeout)
    given = {name: value for name, value in zip(names, values) if value is not None}
    problem = _problem(given, plain[:TEXTS], log_target, row_weights)
    texts = [str(text) for text in plain[:TEXTS]] + problem
    if problem:
        given = {}
    numbers = _numbers_op([_scalar(value) for value in given.values()]) if given else None
    grad = torch.is_grad_enabled()
    wanted = [grad and input.requires_grad, grad and target.requires_grad]
    # As Job.plan_gradients() says.
    late = reduction == "none" and "logits" in (parameters.predictions_form, parameters.targets_form)
    if late or wants_half((input.dtype, target.dtype), wanted) and not is_bounded(
            texts, wanted, row_weights is not None, row_mask is not None, "beta" in given, "normalizer" in given):
        wanted = [False, False]
    loss: Tensor = _loss_op(input, target, vector(row_weights, input), vector(row_mask, input), numbers, texts,
                            list(given), wanted, -1 if connection is None else connection.number)[0]
    return loss


__all__ = ["is_compiling", "kl_div", "vector"]
