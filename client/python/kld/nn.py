"""torch.nn.KLDivLoss over kld. Needs torch."""
from __future__ import annotations

from typing import Any, Optional

from . import functional  # first: says what is missing without torch
from ._connection import Connection

import torch  # isort: skip


class KLDivLoss(torch.nn.Module):
    """torch.nn.KLDivLoss, computed by kld. `options` are those of kld.functional.kl_div() that do not
    change from batch to batch: divergence, input_form, target_form, temperature, scale, ..."""

    def __init__(self, size_average: Optional[bool] = None, reduce: Optional[bool] = None,
                 reduction: str = "mean", log_target: bool = False, *,
                 connection: Optional[Connection] = None, **options: Any) -> None:
        super().__init__()
        if size_average is not None or reduce is not None:
            reduction = functional._legacy_reduction(size_average, reduce)
        self.reduction = reduction
        self.log_target = log_target
        self.connection = connection
        self.options = options

    def forward(self, input: torch.Tensor, target: torch.Tensor, **more: Any) -> torch.Tensor:
        """more: options of this batch: row_mask, row_weights, normalizer, ..."""
        return functional.kl_div(input, target, reduction=self.reduction, log_target=self.log_target,
                                 connection=self.connection, **{**self.options, **more})

    def extra_repr(self) -> str:
        parts = {"reduction": self.reduction, "log_target": self.log_target, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in parts.items())


__all__ = ["KLDivLoss"]
