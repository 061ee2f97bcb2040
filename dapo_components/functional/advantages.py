"""Advantages: how much better an outcome is than what the policy usually gets.

A group is the last dimension: ``[..., G]`` rewards of ``G`` responses to one prompt give ``[..., G]`` advantages.
Statistics are in float64, and a group whose rewards are all equal gets exactly 0. Advantages carry no gradient.
Notation: ``B`` prompts, ``G`` responses per prompt, ``T`` response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_components.functional.groups import group_spread
from dapo_components.functional.reductions import zero_masked

__all__ = ["ADVANTAGE_SCALES", "group_normalized_advantage", "leave_one_out_advantage"]

ADVANTAGE_SCALES: tuple[str, ...] = ("std", "none")
"""What ``group_normalized_advantage`` may divide by."""


def group_normalized_advantage(
    reward: Tensor,
    *,
    scale: str = "std",
    eps: float = 1e-6,
    ddof: int = 1,
    valid: Tensor | None = None,
    rtol: float = 0.0,
) -> Tensor:
    """Return rewards relative to their group's mean, in units of the group's standard deviation.

    ``A_i = (R_i - mean(R)) / (std(R) + eps)`` (GRPO, arXiv:2402.03300; DAPO Eq. 9). ``scale="none"`` does not divide
    (Dr.GRPO, arXiv:2503.20783). A group with fewer than two usable members, or with equal rewards, gets exactly 0:
    the rounded mean of equal rewards would otherwise leave a residue that a small standard deviation blows up.

    The papers do not fix ``ddof``; 1 and ``eps`` added to the standard deviation are what published runs used.

    Args:
        reward: ``[..., G]`` outcome rewards.
        scale: ``"std"`` or ``"none"``.
        eps: Added to the standard deviation, in reward units.
        ddof: 1 divides the sum of squares by ``n - 1``, 0 by ``n``.
        valid: ``[..., G]`` bool, usable members; the others do not enter the statistics and get 0. None uses all.
        rtol: A group counts as equal where ``max - min <= rtol * max(abs(reward))``.

    Returns:
        ``[..., G]`` advantages with the dtype of ``reward``, float32 for integers and half precision.

    Raises:
        TypeError: If ``valid`` is not boolean.
        ValueError: If an argument is out of range or ``valid`` has another shape.

    Example:
        >>> group_normalized_advantage(torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.7, 0.7, 0.7, 0.7]]))
        tensor([[ 0.8660,  0.8660, -0.8660, -0.8660],
                [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """
    check_group_normalization(scale=scale, eps=eps, ddof=ddof, rtol=rtol)
    centered, count, informative = _center(reward, valid, rtol)
    if scale == "std":
        variance = centered.square().sum(dim=-1, keepdim=True) / (count - ddof).clamp(min=1.0)
        centered = centered / (variance.sqrt() + eps)
    return zero_masked(centered, informative).to(_output_dtype(reward))


def leave_one_out_advantage(reward: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return every reward minus the mean reward of the other members of its group.

    ``A_i = R_i - sum(R_j for j != i) / (n - 1)``, which is ``n / (n - 1) * (R_i - mean(R))`` (RLOO, arXiv:2402.14740).
    A group with fewer than two usable members, or with equal rewards, gets exactly 0.

    Args:
        reward: ``[..., G]`` outcome rewards.
        valid: ``[..., G]`` bool, usable members; the others do not enter the baseline and get 0. None uses all.

    Returns:
        ``[..., G]`` advantages with the dtype of ``reward``, float32 for integers and half precision.

    Raises:
        TypeError: If ``valid`` is not boolean.
        ValueError: If ``valid`` has another shape.

    Example:
        >>> leave_one_out_advantage(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor([[ 0.6667, -0.6667, -0.6667,  0.6667]])
    """
    centered, count, informative = _center(reward, valid, 0.0)
    advantage = centered * (count / (count - 1.0).clamp(min=1.0))
    return zero_masked(advantage, informative).to(_output_dtype(reward))


def check_group_normalization(*, scale: str, eps: float, ddof: int, rtol: float) -> None:
    """Check the arguments of ``group_normalized_advantage``; blocks call it in their constructor.

    Raises:
        ValueError: If one is out of range; the message names it, its rule and its value.
    """
    if scale not in ADVANTAGE_SCALES:
        raise ValueError(f"scale must be one of {', '.join(ADVANTAGE_SCALES)}, got {scale!r}")
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"eps must be at least 0 and finite, got {eps}; published runs use 1e-6")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof}; 1 divides by the number of responses minus one")
    if not 0.0 <= rtol < 1.0:
        raise ValueError(f"rtol must be in [0, 1), got {rtol}; 0 treats only exactly equal rewards as equal")


def _center(reward: Tensor, valid: Tensor | None, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract the mean of each group.

    Returns:
        ``[..., G]`` float64 deviations, 0 for unusable members; ``[..., 1]`` number of usable members; ``[..., G]``
        bool, True for usable members of a group that has at least two, with rewards that differ.
    """
    if valid is None:
        valid = torch.ones_like(reward, dtype=torch.bool)
    reward = reward.detach().to(torch.float64)
    spread = group_spread(reward, valid=valid).unsqueeze(-1)
    count = valid.sum(dim=-1, keepdim=True).to(torch.float64)
    usable = zero_masked(reward, valid)
    centered = zero_masked(reward - usable.sum(dim=-1, keepdim=True) / count.clamp(min=1.0), valid)
    # Negated, so that a NaN reward is not taken for an equal one but shows in the result.
    differs = ~(spread <= rtol * usable.abs().amax(dim=-1, keepdim=True))
    return centered, count, valid & differs


def _output_dtype(reward: Tensor) -> torch.dtype:
    return reward.dtype if reward.dtype in (torch.float32, torch.float64) else torch.float32
