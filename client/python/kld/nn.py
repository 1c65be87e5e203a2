"""torch.nn.KLDivLoss over kld. Needs torch."""
from __future__ import annotations

import sys
from typing import Any, Dict, Optional, SupportsFloat, TypedDict

from . import functional  # first: says what is missing without torch
from ._connection import Connection

import torch  # isort: skip

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack  # which torch needs


class Options(TypedDict, total=False):
    """Those of kld.functional.kl_div() that are kld's, as it has them."""

    divergence: str
    input_form: str
    target_form: Optional[str]
    temperature: Optional[SupportsFloat]
    beta: Optional[SupportsFloat]
    skew: Optional[SupportsFloat]
    weight: Optional[SupportsFloat]
    scale: Optional[SupportsFloat]
    normalizer: Optional[SupportsFloat]
    row_weights: Any
    row_mask: Any
    timeout: Optional[float]


class KLDivLoss(torch.nn.Module):
    """torch.nn.KLDivLoss, computed by kld. `options` are those of kld.functional.kl_div() that do not
    change from batch to batch: divergence, input_form, target_form, temperature, scale, ..."""

    def __init__(self, size_average: Optional[bool] = None, reduce: Optional[bool] = None,
                 reduction: str = "mean", log_target: bool = False, *,
                 connection: Optional[Connection] = None, **options: Unpack[Options]) -> None:
        super().__init__()
        for name in options:
            if name not in Options.__annotations__:  # what forward() would say, and where it is wrong
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")
        if size_average is not None or reduce is not None:
            reduction = functional._legacy_reduction(size_average, reduce)
        self.reduction = reduction
        self.log_target = log_target
        self.connection = connection
        self.options = options

    def forward(self, input: torch.Tensor, target: torch.Tensor, **more: Unpack[Options]) -> torch.Tensor:
        """more: options of this batch: row_mask, row_weights, normalizer, ..."""
        options: Dict[str, Any] = {**self.options, **more}
        return functional.kl_div(input, target, reduction=self.reduction, log_target=self.log_target,
                                 connection=self.connection, **options)

    def extra_repr(self) -> str:
        parts = {"reduction": self.reduction, "log_target": self.log_target, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in parts.items())


__all__ = ["KLDivLoss"]
