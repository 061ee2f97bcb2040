"""Policy objectives: a surrogate, its corrections and its regularisers, summed with one set of weights.

``losses`` wraps these functions into blocks that read a batch; with plain tensors, call them directly. Notation: ``B``
prompts, ``G`` responses per prompt, ``T`` response positions, ``W`` the weights of the aggregation mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dapo_components.functional.corrections import rollout_correction_weights
from dapo_components.functional.diagnostics import (
    clip_diagnostics,
    per_rank,
    ratio_diagnostics,
    rollout_diagnostics,
    token_share,
)
from dapo_components.functional.kl import kl_penalty
from dapo_components.functional.precision import at_least_float32
from dapo_components.functional.ratios import token_log_ratio
from dapo_components.functional.reductions import BatchCounts, aggregation_weights, zero_masked
from dapo_components.functional.surrogates import clipped_surrogate

__all__ = ["clipped_policy_objective", "regularized_objective"]


def clipped_policy_objective(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    ref_log_prob: Tensor | None = None,
    entropy: Tensor | None = None,
    rollout_log_prob: Tensor | None = None,
    counts: BatchCounts | None = None,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.28,
    dual_clip: float | None = None,
    aggregation: str = "token_mean",
    length_scale: float | None = None,
    group_num_tokens: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    rollout_correction: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Return the loss of DAPO and its relatives, and what can be measured on the way.

    ``loss = world_size * sum(W * (w * L + kl_coef * KL - entropy_coef * H))`` with ``L`` from ``clipped_surrogate``,
    ``w`` from ``rollout_correction_weights`` (1 without a correction), ``KL`` from ``kl_penalty`` and ``H`` the
    entropy. All terms share ``W``, the weights of ``aggregation_weights``.

    Args:
        log_prob: ``[..., T]`` log-probs under the policy being trained, in nats; the gradient flows into these.
        old_log_prob: ``[..., T]`` log-probs before the first update on the batch.
        advantage: ``[...]`` or ``[..., T]``.
        mask: ``[..., T]`` bool, positions that count in the loss and in its denominator.
        ref_log_prob: ``[..., T]`` log-probs under the reference policy, for the KL term.
        entropy: ``[..., T]`` entropy of the policy in nats, for the bonus; without one it is measured only.
        rollout_log_prob: ``[..., T]`` log-probs of the sampler, for the correction; without one, the mismatch is
            measured only.
        counts: Denominators of the whole optimizer step; None counts this input alone.
        clip_eps_low: As in ``clipped_surrogate``.
        clip_eps_high: As in ``clipped_surrogate``.
        dual_clip: As in ``clipped_surrogate``.
        aggregation: Mode of ``aggregation_weights``.
        length_scale: As in ``aggregation_weights``.
        group_num_tokens: As in ``aggregation_weights``.
        kl_coef: Weight of the KL term.
        kl_estimator: As in ``kl_penalty``.
        entropy_coef: Weight of the entropy bonus.
        rollout_correction: Keyword arguments of ``rollout_correction_weights``; None for no correction.

    Returns:
        ``loss`` with a graph, the terms of ``regularized_objective`` and the results of ``ratio_diagnostics``,
        ``clip_diagnostics`` and ``rollout_diagnostics``, detached scalars.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If an argument is out of range, a needed input is missing or the shapes do not fit.

    Example:
        >>> import torch
        >>> log_prob = torch.zeros(2, 3, requires_grad=True)
        >>> mask = torch.tensor([[True, True, True], [True, False, False]])
        >>> out = clipped_policy_objective(log_prob, torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask)
        >>> out["loss"]
        tensor(-0.5000, grad_fn=<MulBackward0>)
    """
    _require(ref_log_prob, "ref_log_prob", when=kl_coef != 0.0, setting=f"kl_coef={kl_coef}")
    _require(entropy, "entropy", when=entropy_coef != 0.0, setting=f"entropy_coef={entropy_coef}")
    _require(rollout_log_prob, "rollout_log_prob", when=rollout_correction is not None, setting="rollout_correction")
    log_prob, old_log_prob = at_least_float32(log_prob), at_least_float32(old_log_prob.detach())
    log_ratio = token_log_ratio(log_prob, old_log_prob, mask)
    bounds = {"clip_eps_low": clip_eps_low, "clip_eps_high": clip_eps_high, "dual_clip": dual_clip}
    per_token = clipped_surrogate(log_ratio, advantage, mask=mask, **bounds)
    weight = None
    if rollout_correction is not None and rollout_log_prob is not None:
        weight = rollout_correction_weights(old_log_prob, rollout_log_prob, mask, **rollout_correction)
        per_token = per_token * weight
    kl = None
    if ref_log_prob is not None:
        kl = kl_penalty(log_prob, ref_log_prob, estimator=kl_estimator, mask=mask)
    counts = counts if counts is not None else BatchCounts.from_mask(mask if mask.ndim > 1 else mask.unsqueeze(0))
    scale = {"aggregation": aggregation, "length_scale": length_scale, "group_num_tokens": group_num_tokens}
    coefs = {"kl_coef": kl_coef, "entropy_coef": entropy_coef}
    terms = regularized_objective(per_token, mask, kl=kl, entropy=entropy, counts=counts, **coefs, **scale)
    terms |= clip_diagnostics(log_ratio, advantage, mask, counts=counts, **bounds)
    terms |= ratio_diagnostics(log_prob, old_log_prob, mask, counts=counts)
    if rollout_log_prob is not None:
        terms |= rollout_diagnostics(old_log_prob, rollout_log_prob, mask, weight=weight, counts=counts)
    return terms


def regularized_objective(
    per_token: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    entropy: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    counts: BatchCounts | None = None,
    aggregation: str = "token_mean",
    length_scale: float | None = None,
    group_num_tokens: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sum a policy loss, a KL term and an entropy bonus with the same weights ``W``.

    - ``loss``: ``world_size * (policy_loss + kl_coef * kl_loss - entropy_coef * entropy_bonus)``, with a graph,
    - ``policy_loss``: ``sum(W * per_token)``,
    - ``kl_loss``: ``sum(W * kl)``, absent without ``kl``,
    - ``entropy_bonus``: ``sum(W * entropy)``, absent without ``entropy``,
    - ``entropy``: mean over counted tokens in nats, absent without ``entropy``.

    All but ``loss`` are detached and free of the world size: they add up over micro-batches and ranks.

    Args:
        per_token: ``[..., T]`` policy loss.
        mask: ``[..., T]`` bool, positions that count.
        kl: ``[..., T]`` KL estimate; a gradient flows if ``kl_coef`` is not 0.
        entropy: ``[..., T]`` entropy; a gradient flows if ``entropy_coef`` is not 0.
        kl_coef: Weight of the KL term.
        entropy_coef: Weight of the entropy bonus.
        counts: Denominators of the whole optimizer step; None counts this input alone.
        aggregation: Mode of ``aggregation_weights``.
        length_scale: As in ``aggregation_weights``.
        group_num_tokens: As in ``aggregation_weights``.

    Returns:
        Scalars by name.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: As in ``aggregation_weights``.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[True, True]])
        >>> counts = BatchCounts(num_tokens=4, num_sequences=2, num_groups=1, world_size=2)
        >>> regularized_objective(torch.tensor([[1.0, 3.0]]), mask, counts=counts)
        {'loss': tensor(2.), 'policy_loss': tensor(1.)}
    """
    weights = aggregation_weights(
        mask,
        mode=aggregation,
        counts=per_rank(counts),
        length_scale=length_scale,
        group_num_tokens=group_num_tokens,
        dtype=per_token.dtype,
    )
    total = (zero_masked(per_token, mask) * weights).sum()
    terms = {"policy_loss": total.detach()}
    if kl is not None:
        kl_loss = (zero_masked(kl, mask) * weights).sum()
        terms["kl_loss"] = kl_loss.detach()
        total = total + kl_coef * kl_loss if kl_coef != 0.0 else total
    if entropy is not None:
        bonus = (zero_masked(at_least_float32(entropy), mask) * weights).sum()
        terms |= {"entropy_bonus": bonus.detach(), "entropy": token_share(entropy, mask, counts=counts)}
        total = total - entropy_coef * bonus if entropy_coef != 0.0 else total
    return {"loss": total * (1 if counts is None else counts.world_size), **terms}


def _require(value: Tensor | None, name: str, *, when: bool, setting: str) -> None:
    if when and value is None:
        raise ValueError(f"{setting} needs {name}, got None; pass the tensor or switch the term off")
