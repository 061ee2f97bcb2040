"""Correction of the difference between the policy that sampled and the policy that trains.

A sampler with other kernels, other precision or older weights draws from a slightly different distribution than the
trainer's ``old_log_prob`` says. The weights here multiply the policy loss; they never carry a gradient. Notation: ``B``
prompts, ``G`` responses per prompt, ``T`` response positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dapo_components.functional.precision import at_least_float32
from dapo_components.functional.ratios import sequence_log_ratio, token_log_ratio
from dapo_components.functional.reductions import zero_masked

__all__ = ["CORRECTION_LEVELS", "CORRECTION_MODES", "rollout_correction_weights"]

CORRECTION_LEVELS: tuple[str, ...] = ("token", "sequence", "geometric")
"""What one weight of ``rollout_correction_weights`` belongs to."""

CORRECTION_MODES: tuple[str, ...] = ("truncate", "mask")
"""What ``rollout_correction_weights`` does with a weight out of bounds."""


def rollout_correction_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
) -> Tensor:
    """Return importance weights ``exp(old_log_prob - rollout_log_prob)``, bounded and detached.

    | level | weight of a token, before the bound | published as |
    |---|---|---|
    | ``token`` | ``exp(d_t)`` with ``d = old_log_prob - rollout_log_prob`` | TIS (truncate), IcePop (mask, 0.5 to 5) |
    | ``sequence`` | ``exp(sum of d over its response)`` | sequence TIS (truncate), sequence MIS (mask) |
    | ``geometric`` | ``exp(mean of d over its response)`` | geometric masking (mask), bounds close to 1 |

    ``truncate`` takes ``min(weight, upper)``. ``mask`` keeps weights in ``[lower, upper]`` and sets the others to 0:
    those tokens leave the sum of the loss but stay in its denominator, so that the scale of the other tokens does not
    depend on how many were rejected. Truncation has no lower bound: raising small weights is not a correction.

    Use it with the ratio ``log_prob - old_log_prob``. When ``rollout_log_prob`` itself stands in for ``old_log_prob``,
    the ratio holds the correction already and a weight would count it twice.

    Args:
        old_log_prob: ``[..., T]`` log-probs of the trainer before the first update on the batch.
        rollout_log_prob: ``[..., T]`` log-probs that the sampler reported.
        mask: ``[..., T]`` bool, one response per row.
        level: ``token``, ``sequence`` or ``geometric``.
        mode: ``truncate`` or ``mask``.
        upper: Upper bound of a weight.
        lower: Lower bound of a weight, for ``mask`` only; None is 0.

    Returns:
        ``[..., T]`` weights, the same for all tokens of a response unless ``level="token"``; 0 where ``mask`` is False;
        float32 or wider.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If an argument is out of range or the shapes differ.

    Example:
        >>> old, rollout = torch.tensor([[-1.0, -1.0, 0.0]]), torch.tensor([[-2.0, -0.5, 9.0]])
        >>> rollout_correction_weights(old, rollout, torch.tensor([[True, True, False]]))
        tensor([[2.0000, 0.6065, 0.0000]])
    """
    check_rollout_correction({"level": level, "mode": mode, "upper": upper, "lower": lower})
    old_log_prob, rollout_log_prob = at_least_float32(old_log_prob.detach()), at_least_float32(rollout_log_prob)
    if level == "token":
        log_weight = token_log_ratio(old_log_prob, rollout_log_prob, mask)
    else:
        by_length = level == "geometric"
        log_weight = sequence_log_ratio(old_log_prob, rollout_log_prob, mask, length_normalized=by_length)
        log_weight = log_weight.unsqueeze(-1)
    weight = log_weight.exp()
    if mode == "truncate":
        weight = weight.clamp(max=upper)
    else:
        rejected = (weight > upper) | (weight < (0.0 if lower is None else lower))
        weight = torch.where(rejected, 0.0, weight)
    return zero_masked(weight.expand(mask.shape), mask)


def check_rollout_correction(arguments: Mapping[str, Any]) -> None:
    """Check keyword arguments of ``rollout_correction_weights``; blocks call it in their constructor.

    Raises:
        ValueError: If one is unknown or out of range; the message names it, its rule and its value.

    Example:
        >>> check_rollout_correction({"level": "token", "upper": 2.0})
    """
    unknown = sorted(set(arguments) - {"level", "mode", "upper", "lower"})
    if unknown:
        raise ValueError(f"rollout_correction takes level, mode, upper and lower, got {', '.join(unknown)}")
    level, mode = arguments.get("level", "token"), arguments.get("mode", "truncate")
    upper, lower = arguments.get("upper", 2.0), arguments.get("lower")
    if level not in CORRECTION_LEVELS:
        raise ValueError(f"level must be one of {', '.join(CORRECTION_LEVELS)}, got {level!r}")
    if mode not in CORRECTION_MODES:
        raise ValueError(f"mode must be one of {', '.join(CORRECTION_MODES)}, got {mode!r}")
    if not 0.0 < upper < float("inf"):
        raise ValueError(f"upper must be above 0 and finite, got {upper}; 2.0 is common")
    if lower is None:
        return
    if mode == "truncate":
        raise ValueError(f"lower is used by mode='mask' only, got {lower} with mode='truncate'; leave it None")
    if not 0.0 <= lower <= upper:
        raise ValueError(f"lower must be in [0, upper={upper}], got {lower}")
