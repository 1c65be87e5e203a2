"""Gradients in float16, which holds 6e-8 to 65504: what backward() multiplies with (1/65536 as well as GradScaler's
65536) has to come before they are rounded to it, and is not known when the forward pass writes them. No lock.

Where a bound of the gradient is known, the forward pass writes it times a power of two, near the upper end of
float16's range, and backward() divides by that in float32. Elsewhere (a gradient of p/q, or of ln(p/q), may be of any
size, and the weights of rows are the device's) the gradient is asked for in the backward pass, which knows the factor.
"""
from __future__ import annotations

import math
from typing import Any, Optional, Sequence, Tuple

import torch

from ._errors import KldError
from ._checks import check_number
from ._request import Parameters

# Of the gradient of a loss of weight 1. Rows of probabilities and log-probabilities need not sum to 1: those that sum
# to 31 fit, too.
_NORMALISED, _ANY = 14, 11
_SHIFT_MAX = 100  # beyond it float32 has no room for a factor and the power of two
# The gradient with respect to logits, or logarithms, of the predictions is at most 1 where both sides sum to 1.
_BOUNDED = ("forward_kl", "cross_entropy", "js", "skew_kl", "tv")
_REDUCTIONS = ("mean", "batchmean", "sum", "rowmean", "row")


def wants_half(dtypes: Sequence[Any], wanted: Sequence[bool]) -> bool:
    return wanted[0] and dtypes[0] is torch.float16 or wanted[1] and dtypes[1] is torch.float16


def is_bounded(parameters: Sequence[Any], wanted: Sequence[bool], has_weights: bool, has_mask: bool,
               has_beta: bool, has_normalizer: bool) -> bool:
    """Says that of what is known when a graph is made: the first four parameters, and which others are given."""
    divergence, reduction, form = parameters[:3]
    return (not wanted[1] and form != "probs" and divergence in _BOUNDED and reduction in _REDUCTIONS
            and not has_weights and not has_beta  # of 1: ln(p/q)
            and (reduction != "rowmean" or has_normalizer or not has_mask))


def shift(parameters: Parameters, shape: Tuple[int, ...]) -> int:
    """k: the gradient times 2^k fits."""
    scale, temperature, normalizer = _numbers(parameters)
    reduction = parameters.reduction
    divisor = float(1 if reduction in ("sum", "row") else normalizer if normalizer is not None else
                    math.prod(shape) if reduction == "mean" else shape[0] if reduction == "batchmean" else
                    math.prod(shape[:-1]))
    if parameters.predictions_form == "logits":
        divisor *= temperature
    if not (0 < abs(scale) < math.inf and 0 < divisor < math.inf):
        return 0  # nothing to write, or an error to come
    both = parameters.predictions_form == parameters.targets_form == "logits"
    mantissa, exponent = math.frexp(abs(scale) / divisor)
    made = (_NORMALISED if both else _ANY) - exponent + (mantissa == 0.5)
    return max(-_SHIFT_MAX, min(_SHIFT_MAX, made))


def _numbers(parameters: Parameters) -> Tuple[float, float, Optional[float]]:
    try:
        return (1.0 if parameters.scale is None else check_number("scale", parameters.scale),
                1.0 if parameters.temperature is None else check_number("temperature", parameters.temperature),
                None if parameters.normalizer is None else check_number("normalizer", parameters.normalizer))
    except KldError:
        return 0.0, 1.0, None  # which the request will say


__all__ = ["is_bounded", "shift", "wants_half"]
