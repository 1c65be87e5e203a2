"""PyTorch's side: torch.nn.functional.kl_div over kld, with autograd; tensors on the CPU and on CUDA devices.
Needs torch. Any thread; requests of one connection take turns. What runs is _autograd.py's, and under
torch.compile() _compiled.py's.
"""
from __future__ import annotations

import math
import warnings
from typing import Any, Callable, Dict, Optional, Sequence, SupportsFloat, Union

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError("kld.functional and kld.nn are for PyTorch, which is not here: pip install torch; "
                      "without it, kld.kl_div() takes NumPy arrays") from error

from . import _compiled, _repeated, _surroundings
from ._autograd import DTYPES, Job, KlDiv, check, default_for, loss_alone, over, rows_vector
from ._checks import check_no_gradient, sizes_of
from ._connection import Connection
from ._default import for_cpu_tensors
from ._errors import KldTypeError, KldValueError, Status
from ._library import RANK_MAX
from ._request import NUMBERS, Parameters
from ._share import Attached


def _legacy_reduction(size_average: Optional[bool], reduce: Optional[bool]) -> str:
    """What PyTorch's deprecated arguments mean."""
    average, reduced = size_average is None or bool(size_average), reduce is None or bool(reduce)
    text = "mean" if average and reduced else "sum" if reduced else "none"
    warnings.warn(f"size_average and reduce are deprecated, use reduction={text!r}", stacklevel=3)
    return text


def _is_plain(input: Any, target: Any) -> bool:
    """Nothing is wrong with these two; False: check() says what, if anything."""
    return (isinstance(input, torch.Tensor) and isinstance(target, torch.Tensor)
            and not input.is_nested and not target.is_nested and input.shape == target.shape
            and input.dtype in DTYPES and target.dtype in DTYPES
            and input.layout == target.layout == torch.strided and not input.is_neg() and not target.is_neg()
            and (input.is_cpu and target.is_cpu
                 or input.is_cuda and target.is_cuda and input.get_device() == target.get_device()))


def _checked(connection: Any) -> Connection:
    if not isinstance(connection, Connection):
        raise KldTypeError(Status.INVALID, f"connection is what kld.connect() gives, not {type(connection).__name__}")
    return connection


def _resolved(tensor: Any) -> Any:
    """The numbers of a view that says of its memory that they are negative (the imaginary part of a conj())."""
    return tensor.resolve_neg() if isinstance(tensor, torch.Tensor) else tensor


def _can_be_folded(input: torch.Tensor, target: Any) -> bool:
    """Otherwise it is refused, in check()'s words."""
    return (isinstance(target, torch.Tensor) and not input.is_nested and not target.is_nested
            and input.layout == target.layout == torch.strided and input.shape == target.shape)


def _folded(input: torch.Tensor, target: torch.Tensor, reduction: str, row_weights: Any, row_mask: Any,
            options: Dict[str, Any], is_plain: bool) -> torch.Tensor:
    """For more dimensions than libkld takes: all between the first, which batchmean divides by, and the last as one."""
    shape, leading = input.shape, input.shape[:-1]
    if is_plain and 0 in shape:
        raise KldValueError(Status.INVALID, f"dimension {tuple(shape).index(0)} of the shape is 0")
    fold, by_row = (shape[0], math.prod(shape[1:-1]), shape[-1]), [row_weights, row_mask]
    for index, name in enumerate(("row_weights", "row_mask")):
        value = by_row[index]
        if is_plain:  # in terms of the shape that the caller knows
            value = rows_vector(name, value, tuple(leading), input.device)
            by_row[index] = None if value is None else value.reshape(-1)
        else:
            vector: Any = _compiled.vector(value, input) if isinstance(value, (list, tuple)) else value
            if getattr(vector, "shape", None) == leading:
                by_row[index] = vector.reshape(-1)
    loss = kl_div(input.reshape(fold), target.reshape(fold), reduction=reduction, row_weights=by_row[0],
                  row_mask=by_row[1], **options)
    return loss.reshape(shape if reduction == "none" else leading) if reduction in ("none", "row") else loss


def kl_div(input: torch.Tensor, target: Any, size_average: Optional[bool] = None,
           reduce: Optional[bool] = None, reduction: str = "mean", log_target: bool = False, *,
           divergence: str = "forward_kl", input_form: str = "logprobs", target_form: Optional[str] = None,
           temperature: Optional[SupportsFloat] = None, beta: Optional[SupportsFloat] = None,
           skew: Optional[SupportsFloat] = None, weight: Optional[SupportsFloat] = None,
           scale: Optional[SupportsFloat] = None, normalizer: Optional[SupportsFloat] = None,
           row_weights: Any = None, row_mask: Any = None,
           connection: Optional[Connection] = None, timeout: Optional[float] = None) -> torch.Tensor:
    """torch.nn.functional.kl_div(), computed by kld; the first six arguments are PyTorch's.

    input holds log-probabilities, target probabilities, or log-probabilities with log_target=True;
    input_form and target_form ("probs", "logprobs", "logits") say otherwise. reduction: "mean" (over all
    elements; "elementwise_mean" is PyTorch's deprecated name for it), "batchmean", "sum", "none", and kld's "row",
    "rowmean". The others are kld's, as in Connection.kl_div(). Without a connection: the environment's KLD_SERVER, else
    this process: on the device of CUDA tensors, or on the CPU, with torch.get_num_threads() threads.

    CUDA tensors: nothing is copied and the host never waits; the work is ordered with the current stream.
    target may be a kld.Attached tensor of another process; its form is then as it was published, where target_form does
    not say otherwise. log_target=True with one that was published as another form is refused.

    Different from PyTorch: shapes must be equal; 0 log 0 is 0 also with log_target=True; the loss of
    float16 and bfloat16 inputs is float32, as under autocast, and their gradients are rounded once multiplied.
    """
    traced = _compiled.is_compiling()
    if traced and (not isinstance(input, torch.Tensor) or not isinstance(target, torch.Tensor)
                   or _surroundings.are_transformed()):
        return _outside(input, target, size_average, reduce, reduction, log_target, divergence=divergence,
                        input_form=input_form, target_form=target_form, temperature=temperature, beta=beta, skew=skew,
                        weight=weight, scale=scale, normalizer=normalizer, row_weights=row_weights, row_mask=row_mask,
                        connection=connection, timeout=timeout)
    asked: Optional[_repeated.Asked] = None
    if (not traced and row_weights is None and row_mask is None and size_average is None and reduce is None
            and (log_target is False or log_target is True)):
        asked = (reduction, log_target, divergence, input_form, target_form, temperature, beta, skew, weight, scale,
                 normalizer, timeout)
        loss = _repeated.kl_div(input, target, connection, asked)
        if loss is not None:
            return loss
    if size_average is not None or reduce is not None:
        reduction = _legacy_reduction(size_average, reduce)
    elif isinstance(reduction, str) and reduction == "elementwise_mean":
        warnings.warn("reduction='elementwise_mean' is deprecated, use reduction='mean'", stacklevel=2)
        reduction, asked = "mean", None
    if not traced and isinstance(log_target, np.bool_):
        log_target = bool(log_target)
    if isinstance(input, torch.Tensor) and input.dim() > RANK_MAX and _can_be_folded(input, target):
        options = {"log_target": log_target, "divergence": divergence, "input_form": input_form,
                   "target_form": target_form, "temperature": temperature, "beta": beta, "skew": skew, "weight": weight,
                   "scale": scale, "normalizer": normalizer, "connection": connection, "timeout": timeout}
        return _folded(input, target, reduction, row_weights, row_mask, options,
                       not traced and _surroundings.are_ordinary(input, target))
    if target_form is None:
        attached = isinstance(target, Attached)
        target_form = target.form if attached else "logprobs" if log_target else "probs"
        if attached and log_target is True and target_form != "logprobs":
            raise KldValueError(Status.INVALID, f"log_target=True, and the attached tensor {target.name!r} was published as "
                                f"{target_form!r}; expected log_target=False, or target_form=\"logprobs\" where it "
                                "holds those")
    parameters = Parameters(divergence, reduction, input_form, target_form, temperature, beta, skew, weight, scale,
                            normalizer)
    if traced or not _surroundings.are_ordinary(input, target):
        return _compiled.kl_div(input, target, parameters, log_target, row_weights, row_mask, connection, timeout)
    if not _is_plain(input, target):
        check(input, target)
        input, target = _resolved(input), _resolved(target)
    if not isinstance(log_target, bool):
        raise KldTypeError(Status.INVALID, f"log_target is a bool, not {type(log_target).__name__}")
    if log_target and target_form != "logprobs":
        raise KldValueError(Status.INVALID, f"log_target=True and target_form={target_form!r} contradict each other")
    if isinstance(target, Attached) and connection is None:
        connection = target.connection
    if connection is None:
        connection = default_for(input)
    elif type(connection) is not Connection:
        _checked(connection)
    if not (temperature is None and beta is None and skew is None and weight is None and scale is None
            and normalizer is None):
        for name, value in zip(NUMBERS, parameters[4:]):
            check_no_gradient(name, value)  # before autograd, inside of which nothing asks for gradients
    if row_weights is not None or row_mask is not None:
        leading, device = tuple(input.shape[:-1]), input.device
        if row_weights is not None:
            row_weights = rows_vector("row_weights", row_weights, leading, device)
        if row_mask is not None:
            row_mask = rows_vector("row_mask", row_mask, leading, device)
    job = Job(connection, parameters, row_weights, row_mask, timeout)
    wanted = torch.is_grad_enabled() and (input.requires_grad or (isinstance(target, torch.Tensor)
                                                                  and target.requires_grad))
    apply: Callable[..., torch.Tensor] = KlDiv.apply if wanted else loss_alone
    if isinstance(target, Attached):
        return apply(input, target.view(connection), job)
    if input.dim() == 0 and reduction in ("mean", "batchmean", "sum", "none"):
        return apply(input.reshape(1), target.reshape(1), job).reshape(())
    loss = apply(input, target, job)
    if asked is not None:
        _repeated.learn(input, target, asked, job, wanted)
    return loss


def empty(*shape: Union[int, Sequence[int]], dtype: torch.dtype = torch.float32,
          connection: Optional[Connection] = None, requires_grad: bool = False) -> torch.Tensor:
    """torch.empty() on the CPU, in memory that the server shares: kl_div() uses it without a copy. It may
    outlive the connection. (Of CUDA tensors any will do.)"""
    made = sizes_of(shape[0] if len(shape) == 1 else shape)
    if dtype not in DTYPES:
        raise KldTypeError(Status.INVALID, f"dtype {dtype}; kld takes " + ", ".join(map(str, DTYPES)))
    used = for_cpu_tensors(torch.get_num_threads()) if connection is None else _checked(connection)
    size = torch.empty((), dtype=dtype).element_size()
    for dimension in made:
        size *= dimension
    tensor = over(used._alone(lambda: used._memory.take(size, used._tidy)), dtype, made)
    tensor.requires_grad_(requires_grad)
    return tensor


_outside: Callable[..., torch.Tensor] = _surroundings.outside(kl_div)

__all__ = ["empty", "kl_div"]
