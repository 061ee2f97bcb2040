"""What a policy loss returns: the scalar to differentiate, and named measurements that add up."""

from __future__ import annotations

from tensordict import TensorClass
from torch import Tensor

__all__ = ["PolicyLossOutput"]


class PolicyLossOutput(TensorClass):
    """Loss and metrics of one call; all fields are scalars, a metric that was not measured is None.

    Only ``loss`` has a graph and the factor ``world_size``, which is there because DDP and FSDP average gradients.
    Every metric is divided by the counts of the whole optimizer step, so the sum over micro-batches and ranks is the
    number of the full batch; the two that end in ``_max`` reduce by maximum. With ``W`` the weights of the aggregation
    mode, ``N`` the counted tokens of the step, ``r`` the ratio and ``d`` its log, ``A`` the advantage, ``w`` the
    correction weight, and sums over counted tokens:

    Args:
        loss: ``world_size * (policy_loss + kl_coef * kl_loss - entropy_coef * entropy_bonus)``.
        policy_loss: ``sum(W * w * L)``, ``L`` the clipped surrogate.
        ratio_mean: ``sum(r) / N``.
        approx_kl_k1: ``sum(-d) / N``, estimates ``KL(old || new)`` in nats.
        approx_kl_k3: ``sum(r - 1 - d) / N``, the same, never negative.
        log_ratio_max: ``max(|d|)`` before any bound.
        clip_ratio_low_mean: ``#(A < 0 and r < 1 - clip_eps_low) / N``.
        clip_ratio_high_mean: ``#(A > 0 and r > 1 + clip_eps_high) / N``.
        clip_ratio_dual_mean: ``#(A < 0 and r > dual_clip) / N``; with ``dual_clip``.
        kl_loss: ``sum(W * KL)`` before its coefficient; with ``ref_log_prob``.
        entropy: ``sum(H) / N`` in nats; with ``entropy``.
        entropy_bonus: ``sum(W * H)`` before its coefficient; with ``entropy``.
        rollout_mismatch_mean: ``sum(|old_log_prob - rollout_log_prob|) / N``; with ``rollout_log_prob``.
        rollout_mismatch_max: ``max(|old_log_prob - rollout_log_prob|)``; with ``rollout_log_prob``.
        correction_weight_mean: ``sum(w) / N``; with ``rollout_correction``.
        correction_weight_square_mean: ``sum(w**2) / N``; with ``rollout_correction``. The squared mean over this is the
            effective sample size as a share of ``N``.

    Example:
        >>> import torch
        >>> zero = torch.zeros(())
        >>> output = PolicyLossOutput(zero, zero, zero + 1, zero, zero, zero, zero, zero, batch_size=[])
        >>> values, reduced_by_max = output.metrics()
        >>> values["ratio_mean"], sorted(reduced_by_max)
        (tensor(1.), ['log_ratio_max'])
    """

    _documentation = __doc__

    loss: Tensor
    policy_loss: Tensor
    ratio_mean: Tensor
    approx_kl_k1: Tensor
    approx_kl_k3: Tensor
    log_ratio_max: Tensor
    clip_ratio_low_mean: Tensor
    clip_ratio_high_mean: Tensor
    clip_ratio_dual_mean: Tensor | None = None
    kl_loss: Tensor | None = None
    entropy: Tensor | None = None
    entropy_bonus: Tensor | None = None
    rollout_mismatch_mean: Tensor | None = None
    rollout_mismatch_max: Tensor | None = None
    correction_weight_mean: Tensor | None = None
    correction_weight_square_mean: Tensor | None = None

    def metrics(self) -> tuple[dict[str, Tensor], frozenset[str]]:
        """Return the measured metrics under their logging names, and which of them reduce by maximum.

        The others are summed over micro-batches and ranks. Names are those of the fields, with ``clip_ratio_low_mean``
        and its siblings written ``clip_ratio/low_mean`` as in TRL.

        Returns:
            Detached scalars by name, and the names that reduce by maximum.
        """
        values = {
            name.replace("clip_ratio_", "clip_ratio/"): value
            for name, value in self.items()
            if name != "loss" and value is not None
        }
        return values, frozenset(name for name in values if name.endswith("_max"))


# TensorClass replaces the docstring by its signature; help() should show what the fields mean.
PolicyLossOutput.__doc__ = PolicyLossOutput._documentation
