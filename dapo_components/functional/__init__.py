"""Tensors in, tensors out: all arithmetic of the library. Needs torch only."""

from __future__ import annotations

from dapo_components.functional.advantages import (
    group_normalized_advantage,
    leave_one_out_advantage,
)
from dapo_components.functional.corrections import (
    rollout_correction_weights,
)
from dapo_components.functional.diagnostics import (
    clip_diagnostics,
    ratio_diagnostics,
    rollout_diagnostics,
    token_share,
)
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
from dapo_components.functional.kl import (
    kl_penalty,
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
from dapo_components.functional.objectives import (
    clipped_policy_objective,
    regularized_objective,
)
from dapo_components.functional.precision import (
    at_least_float32,
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
    group_num_tokens,
    masked_mean,
    masked_sum,
    zero_masked,
)
from dapo_components.functional.surrogates import (
    active_clip_masks,
    clipped_surrogate,
    expand_to_tokens,
)

__all__ = [
    "AGGREGATIONS",
    "BatchCounts",
    "Estimate",
    "active_clip_masks",
    "aggregate",
    "aggregation_weights",
    "at_least_float32",
    "check_mask",
    "clip_diagnostics",
    "clipped_policy_objective",
    "clipped_surrogate",
    "expand_to_tokens",
    "group_normalized_advantage",
    "group_num_tokens",
    "group_spread",
    "informative_mask",
    "kl_penalty",
    "leave_one_out_advantage",
    "linear_log_probs",
    "majority_at_k",
    "mask_truncated",
    "masked_mean",
    "masked_sum",
    "mean_at_k",
    "pass_at_k",
    "ratio_diagnostics",
    "regularized_objective",
    "rollout_correction_weights",
    "rollout_diagnostics",
    "sequence_log_ratio",
    "soft_overlong_punishment",
    "token_entropy",
    "token_log_probs",
    "token_log_ratio",
    "token_share",
    "truncation_mask",
    "zero_masked",
]
