"""Tensors in, tensors out: all arithmetic of the library. Needs torch only."""

from __future__ import annotations

from dapo_components.functional.reductions import (
    AGGREGATIONS,
    BatchCounts,
    aggregate,
    aggregation_weights,
    check_mask,
    masked_mean,
    masked_sum,
    zero_masked,
)

__all__ = [
    "AGGREGATIONS",
    "BatchCounts",
    "aggregate",
    "aggregation_weights",
    "check_mask",
    "masked_mean",
    "masked_sum",
    "zero_masked",
]
