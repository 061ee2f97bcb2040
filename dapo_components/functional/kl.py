"""Per-token estimators of the KL divergence between two policies.

Every estimator looks at the sampled tokens only. Which one to take depends on its gradient, not only on its value: see
the table in ``kl_penalty``. Notation: ``B`` prompts, ``G`` responses per prompt, ``T`` response positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapo_components.functional.precision import at_least_float32
from dapo_components.functional.reductions import zero_masked

__all__ = ["KL_ESTIMATORS", "kl_penalty"]

KL_ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3", "abs")
"""Names that ``kl_penalty`` knows."""

# exp of anything larger overflows float32, and an infinite value under the clamp would have a NaN gradient.
_LARGEST_EXPONENT = 80.0


def kl_penalty(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    *,
    estimator: str = "k3",
    clamp: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Estimate ``KL(policy || reference)`` at every sampled token.

    With ``k1 = log_prob - ref_log_prob`` the estimators are ``k1``, ``k2 = k1**2 / 2``, ``k3 = exp(-k1) - 1 + k1`` and
    ``abs = |k1|`` (J. Schulman, "Approximating KL divergence", 2020). For tokens sampled from the policy itself:

    | estimator | value | expected gradient when added to a loss |
    |---|---|---|
    | ``k1`` | unbiased, may be negative | 0, so it does nothing; put it in the reward, detached |
    | ``k2`` | biased, small near 0 | that of the reverse KL, the one wanted |
    | ``k3`` | unbiased, never negative | that of the forward KL, ``KL(reference \|\| policy)`` |
    | ``abs`` | mean absolute log-ratio | neither |

    Args:
        log_prob: ``[..., T]`` log-probs under the policy, in nats.
        ref_log_prob: ``[..., T]`` log-probs under the reference; no gradient flows into it.
        estimator: One of ``k1``, ``k2``, ``k3``, ``abs``.
        clamp: Bounds the value to ``[-clamp, clamp]``. It removes the gradient exactly where the policies differ most,
            so the default is None; 10.0 gives the numbers of libraries that clamp.
        mask: ``[..., T]`` bool; elsewhere value and gradient are 0 whatever the inputs hold. None keeps every position.

    Returns:
        ``[..., T]`` in nats, float32 or wider.

    Raises:
        ValueError: If the estimator is unknown, ``clamp`` is not positive or the shapes differ.

    Example:
        >>> kl_penalty(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -1.0]), estimator="k3")
        tensor([0.3679, 0.0000])
    """
    check_kl_estimator(estimator=estimator, clamp=clamp)
    if log_prob.shape != ref_log_prob.shape:
        raise ValueError(
            f"log_prob and ref_log_prob must have one shape, got {tuple(log_prob.shape)} and "
            f"{tuple(ref_log_prob.shape)}; select rows of both with the same index"
        )
    log_prob = at_least_float32(log_prob)
    ref_log_prob = ref_log_prob.detach().to(log_prob.dtype)
    if mask is not None:
        # Each operand, not their difference, so that no NaN is ever made: anomaly detection stays usable.
        log_prob, ref_log_prob = zero_masked(log_prob, mask), zero_masked(ref_log_prob, mask)
    value = _estimate(log_prob - ref_log_prob, estimator, clamp)
    return value if clamp is None else value.clamp(-clamp, clamp)


def check_kl_estimator(*, estimator: str, clamp: float | None = None) -> None:
    """Check the arguments of ``kl_penalty``; blocks call it in their constructor.

    Raises:
        ValueError: If the estimator is unknown or ``clamp`` is not positive.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")
    if clamp is not None and not clamp > 0.0:
        raise ValueError(f"KL clamp must be above 0, got {clamp}; use None for no clamp")


def _estimate(k1: Tensor, estimator: str, clamp: float | None) -> Tensor:
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return 0.5 * k1.square()
    if estimator == "abs":
        return k1.abs()
    if clamp is not None:
        # k3 exceeds x**2 / 2 at k1 = -x: below this bound the value is at the clamp anyway, and no gradient overflows.
        k1 = k1.clamp(min=-min(max(1.0, math.sqrt(2.0 * clamp)), _LARGEST_EXPONENT))
    return torch.expm1(-k1) + k1
