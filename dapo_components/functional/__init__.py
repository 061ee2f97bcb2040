"""Tensors in, tensors out: all arithmetic of the library. Needs torch only."""

from __future__ import annotations

from dapo_components.functional.evaluation import (
    Estimate,
    majority_at_k,
    mean_at_k,
    pass_at_k,
)
from dapo_components.functional.groups import (
    group_spread,
    informative_mask,
)
from dapo_components.functional.lengths import (
    mask_truncated,
    soft_overlong_punishment,
    truncation_mask,
)
from dapo_components.functional.log_probs import (
    linear_log_probs,
    token_entropy,
    token_log_probs,
)
from dapo_components.functional.ratios import (
    sequence_log_ratio,
    token_log_ratio,
)
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
    "Estimate",
    "aggregate",
    "aggregation_weights",
    "check_mask",
    "group_spread",
    "informative_mask",
    "linear_log_probs",
    "majority_at_k",
    "mask_truncated",
    "masked_mean",
    "masked_sum",
    "mean_at_k",
    "pass_at_k",
    "sequence_log_ratio",
    "soft_overlong_punishment",
    "token_entropy",
    "token_log_probs",
    "token_log_ratio",
    "truncation_mask",
    "zero_masked",
]
