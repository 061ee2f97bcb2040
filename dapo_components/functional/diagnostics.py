"""Measurements of a policy update that cost no second look at the model.

All are detached and built to be added: a share is divided by the counts of the whole optimizer step, so the sum over
micro-batches and ranks is the number of the full batch. The only exceptions end in ``_max`` and reduce by maximum.
Notation: ``B`` prompts, ``G`` responses per prompt, ``T`` response positions, ``N`` the counted tokens of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_components.functional.kl import kl_penalty
from dapo_components.functional.precision import at_least_float32
from dapo_components.functional.ratios import token_log_ratio
from dapo_components.functional.reductions import BatchCounts, aggregation_weights, zero_masked
from dapo_components.functional.surrogates import active_clip_masks

__all__ = ["clip_diagnostics", "per_rank", "ratio_diagnostics", "rollout_diagnostics", "token_share"]


def ratio_diagnostics(
    log_prob: Tensor, old_log_prob: Tensor, mask: Tensor, *, counts: BatchCounts | None = None
) -> dict[str, Tensor]:
    """Measure how far the policy has moved since the batch was made.

    With ``d = log_prob - old_log_prob``, bounded to 20 nats as in the loss except for the maximum:

    - ``ratio_mean``: ``sum(exp(d)) / N``, near 1 as long as the ratios are trustworthy,
    - ``approx_kl_k1``: ``sum(-d) / N``, estimates ``KL(old || new)`` without bias, may be negative,
    - ``approx_kl_k3``: ``sum(exp(d) - 1 - d) / N``, the same with less variance, never negative,
    - ``log_ratio_max``: ``max(|d|)``, exactly 0 on the first update if trainer and snapshot agree.

    Args:
        log_prob: ``[..., T]`` log-probs under the policy being trained, in nats.
        old_log_prob: ``[..., T]`` log-probs before the first update on the batch.
        mask: ``[..., T]`` bool, positions that count.
        counts: Denominators of the whole optimizer step; its world size is not used. None counts ``mask`` alone.

    Returns:
        Detached scalars by name.

    Example:
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
        >>> {name: round(float(x), 3) for name, x in ratio_diagnostics(torch.tensor([[0.5, 0.0]]), old, mask).items()}
        {'ratio_mean': 1.324, 'approx_kl_k1': -0.25, 'approx_kl_k3': 0.074, 'log_ratio_max': 0.5}
    """
    log_prob, old_log_prob = at_least_float32(log_prob.detach()), at_least_float32(old_log_prob)
    log_ratio = token_log_ratio(log_prob, old_log_prob, mask)
    share = _token_weights(mask, counts, log_ratio.dtype)
    zero = torch.zeros_like(log_ratio)
    return {
        "ratio_mean": (log_ratio.exp() * share).sum(),
        "approx_kl_k1": (kl_penalty(zero, log_ratio, estimator="k1") * share).sum(),
        "approx_kl_k3": (kl_penalty(zero, log_ratio, estimator="k3") * share).sum(),
        "log_ratio_max": _largest(token_log_ratio(log_prob, old_log_prob, mask, clamp=None)),
    }


def clip_diagnostics(
    log_ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.28,
    dual_clip: float | None = None,
    counts: BatchCounts | None = None,
) -> dict[str, Tensor]:
    """Measure which share of the counted tokens each clip bound has stopped.

    Only active clips count: ratios outside the band whose gradient the bound really removes (``active_clip_masks``).

    - ``clip_ratio_low_mean``: ``#(A < 0 and r < 1 - clip_eps_low) / N``,
    - ``clip_ratio_high_mean``: ``#(A > 0 and r > 1 + clip_eps_high) / N``,
    - ``clip_ratio_dual_mean``: ``#(A < 0 and r > dual_clip) / N``, absent without ``dual_clip``.

    Args:
        log_ratio: ``[..., T]`` log of new over old probability.
        advantage: ``[...]`` or ``[..., T]``.
        mask: ``[..., T]`` bool, positions that count.
        clip_eps_low: As in ``clipped_surrogate``.
        clip_eps_high: As in ``clipped_surrogate``.
        dual_clip: As in ``clipped_surrogate``.
        counts: Denominators of the whole optimizer step; its world size is not used. None counts ``mask`` alone.

    Returns:
        Detached scalars by name.

    Example:
        >>> log_ratio, mask = torch.tensor([[0.5, 1.5]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> clip_diagnostics(log_ratio, torch.tensor([1.0]), mask)
        {'clip_ratio_low_mean': tensor(0.), 'clip_ratio_high_mean': tensor(0.5000)}
    """
    low, high, dual = active_clip_masks(
        log_ratio, advantage, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, dual_clip=dual_clip, mask=mask
    )
    share = _token_weights(mask, counts)
    values = {"clip_ratio_low_mean": (low * share).sum(), "clip_ratio_high_mean": (high * share).sum()}
    if dual_clip is not None:
        values["clip_ratio_dual_mean"] = (dual * share).sum()
    return values


def rollout_diagnostics(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    *,
    weight: Tensor | None = None,
    counts: BatchCounts | None = None,
) -> dict[str, Tensor]:
    """Measure how far the sampler's log-probs are from the trainer's.

    With ``d = old_log_prob - rollout_log_prob``:

    - ``rollout_mismatch_mean``: ``sum(|d|) / N`` in nats,
    - ``rollout_mismatch_max``: ``max(|d|)``,
    - ``correction_weight_mean``: ``sum(w) / N``, absent without ``weight``,
    - ``correction_weight_square_mean``: ``sum(w**2) / N``, absent without ``weight``. Squared mean over mean square is
      the effective sample size as a share of ``N``.

    Args:
        old_log_prob: ``[..., T]`` log-probs of the trainer before the first update.
        rollout_log_prob: ``[..., T]`` log-probs that the sampler reported.
        mask: ``[..., T]`` bool, positions that count.
        weight: ``[..., T]`` result of ``rollout_correction_weights``, if it is used.
        counts: Denominators of the whole optimizer step; its world size is not used. None counts ``mask`` alone.

    Returns:
        Detached scalars by name.

    Example:
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> rollout_diagnostics(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), mask)
        {'rollout_mismatch_mean': tensor(0.2500), 'rollout_mismatch_max': tensor(0.5000)}
    """
    old_log_prob, rollout_log_prob = at_least_float32(old_log_prob.detach()), at_least_float32(rollout_log_prob)
    difference = token_log_ratio(old_log_prob, rollout_log_prob, mask, clamp=None)
    share = _token_weights(mask, counts, difference.dtype)
    values = {
        "rollout_mismatch_mean": (difference.abs() * share).sum(),
        "rollout_mismatch_max": _largest(difference),
    }
    if weight is not None:
        weight = zero_masked(weight.detach(), mask)
        values["correction_weight_mean"] = (weight * share).sum()
        values["correction_weight_square_mean"] = (weight.square() * share).sum()
    return values


def token_share(per_token: Tensor, mask: Tensor, *, counts: BatchCounts | None = None) -> Tensor:
    """Return ``sum(per_token over mask) / N``, detached, at least float32, and never multiplied by the world size.

    Args:
        per_token: ``[..., T]``; masked positions may hold anything.
        mask: ``[..., T]`` bool.
        counts: Denominators of the whole optimizer step. None counts ``mask`` alone.

    Returns:
        Scalar.

    Example:
        >>> mask = torch.tensor([[True, False]])
        >>> token_share(torch.tensor([[3.0, 5.0]]), mask, counts=BatchCounts(4, 1, 1, world_size=2))
        tensor(0.7500)
    """
    per_token = at_least_float32(per_token.detach())
    return (zero_masked(per_token, mask) * _token_weights(mask, counts, per_token.dtype)).sum()


def per_rank(counts: BatchCounts | None) -> BatchCounts | None:
    """Return ``counts`` without the factor that only a loss needs, because its gradient is averaged over ranks.

    Example:
        >>> per_rank(BatchCounts(6, 3, 2, world_size=8)).world_size
        1
    """
    return None if counts is None else BatchCounts(counts.num_tokens, counts.num_sequences, counts.num_groups)


def _token_weights(mask: Tensor, counts: BatchCounts | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """One over the counted tokens of the step, 0 where masked."""
    return aggregation_weights(mask, mode="token_mean", counts=per_rank(counts), dtype=dtype)


def _largest(log_ratio: Tensor) -> Tensor:
    """Largest absolute value; 0 for a rank that has no rows, where ``max`` itself would fail."""
    return log_ratio.abs().max() if log_ratio.numel() else log_ratio.sum()
