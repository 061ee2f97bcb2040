"""The clipped policy loss as a block that reads a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from tensordict import TensorDictBase

from dapo_components.data.component import Component, as_key
from dapo_components.data.keys import Key
from dapo_components.functional.corrections import check_rollout_correction
from dapo_components.functional.kl import check_kl_estimator
from dapo_components.functional.objectives import clipped_policy_objective
from dapo_components.functional.reductions import AGGREGATIONS, BatchCounts, aggregation_weights
from dapo_components.functional.surrogates import check_clip_bounds
from dapo_components.losses.output import PolicyLossOutput

__all__ = ["DAPOLoss"]


@final
class DAPOLoss(Component):
    """Clipped policy loss with clip-higher and token-level aggregation (DAPO, arXiv:2503.14476, Eq. 8 to 12).

    ``loss = world_size * sum(W * (w * L + kl_coef * KL - entropy_coef * H))``: see ``clipped_policy_objective``, which
    this block calls and which takes plain tensors. The defaults are DAPO's. Its relatives differ in arguments:

    | algorithm | ``clip_eps_high`` | ``aggregation`` | other arguments | advantage |
    |---|---|---|---|---|
    | PPO (1707.06347) | 0.2 | ``token_mean`` | | any, per token |
    | GRPO (2402.03300) | 0.2 | ``seq_mean_token_mean`` | ``kl_coef=0.04`` | group, ``scale="std"`` |
    | Dr.GRPO (2503.20783) | 0.2 | ``seq_mean_token_sum_norm`` | ``length_scale`` | group, ``scale="none"`` |
    | DAPO as released | 0.28 | ``token_mean`` | | group, ``scale="std"`` |
    | DAPO Eq. 8 read literally | 0.28 | ``group_token_mean`` | | group, ``scale="std"`` |

    A batch is ``[B, G, T]`` or rows ``[N, T]``. Parts of a batch add up to the loss and gradient of the whole if every
    call gets the same ``counts``: those of the whole optimizer step over all ranks. Nothing is read at positions where
    the loss mask is False, and a batch without a single counted token has loss 0 and zero gradients.

    Args:
        clip_eps_low: A probability is pushed down to ``1 - clip_eps_low`` times the old one at most; 0.2 in the paper.
        clip_eps_high: A probability is pushed up to ``1 + clip_eps_high`` times the old one at most; 0.28 in the paper.
        dual_clip: Bound above 1 on the ratio where the advantage is negative, or None.
        aggregation: ``token_mean``, ``seq_mean_token_mean``, ``seq_mean_token_sum``, ``seq_mean_token_sum_norm`` or
            ``group_token_mean``.
        length_scale: Constant of ``seq_mean_token_sum_norm`` in tokens, the longest allowed response.
        kl_coef: Weight of the KL to the reference policy; not 0 makes ``ref_log_prob`` required.
        kl_estimator: ``k1``, ``k2``, ``k3`` or ``abs``; ``kl_penalty`` says which gradient each has.
        entropy_coef: Weight of the entropy bonus; not 0 makes ``entropy`` required.
        rollout_correction: Arguments ``level``, ``mode``, ``upper``, ``lower`` of ``rollout_correction_weights``; makes
            ``rollout_log_prob`` required. None for no correction.
        log_prob_key: Where the log-probs under the policy are, ``[..., T]``.
        old_log_prob_key: Where the log-probs before the first update are, ``[..., T]``.
        advantage_key: Where the advantage is, ``[...]`` or ``[..., T]``.
        mask_key: Where the loss mask is, ``[..., T]``.
        ref_log_prob_key: Where the reference's log-probs are; measured if present.
        entropy_key: Where the entropy is; measured if present.
        rollout_log_prob_key: Where the sampler's log-probs are; the mismatch is measured if present.
        group_num_tokens_key: Where the tokens of each row's whole group are, ``[...]``; ``group_token_mean`` needs them
            when groups are split over calls.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict(
        ...     {
        ...         "log_prob": torch.tensor([[[0.5], [0.5]]], requires_grad=True),
        ...         "old_log_prob": torch.zeros(1, 2, 1),
        ...         "advantage": torch.tensor([[1.0, -1.0]]),
        ...         "loss_mask": torch.ones(1, 2, 1, dtype=torch.bool),
        ...     },
        ...     batch_size=[1, 2],
        ... )
        >>> output = DAPOLoss()(batch)
        >>> output.loss  # (-1.28 + exp(0.5)) / 2: the gain is clipped, the loss is not
        tensor(0.1844, grad_fn=<MulBackward0>)
        >>> output.clip_ratio_high_mean
        tensor(0.5000)
    """

    def __init__(
        self,
        *,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.28,
        dual_clip: float | None = None,
        aggregation: str = "token_mean",
        length_scale: float | None = None,
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
        entropy_coef: float = 0.0,
        rollout_correction: Mapping[str, Any] | None = None,
        log_prob_key: Key = "log_prob",
        old_log_prob_key: Key = "old_log_prob",
        advantage_key: Key = "advantage",
        mask_key: Key = "loss_mask",
        ref_log_prob_key: Key = "ref_log_prob",
        entropy_key: Key = "entropy",
        rollout_log_prob_key: Key = "rollout_log_prob",
        group_num_tokens_key: Key = "group_num_tokens",
    ) -> None:
        check_clip_bounds(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, dual_clip=dual_clip)
        check_kl_estimator(estimator=kl_estimator)
        _check_aggregation(aggregation, length_scale)
        _check_finite(kl_coef=kl_coef, entropy_coef=entropy_coef)
        if rollout_correction is not None:
            rollout_correction = dict(rollout_correction)
            check_rollout_correction(rollout_correction)
        required = {"log_prob": log_prob_key, "old_log_prob": old_log_prob_key, "advantage": advantage_key}
        required["mask"] = mask_key
        measured = {"group_num_tokens": group_num_tokens_key}
        (required if kl_coef != 0.0 else measured)["ref_log_prob"] = ref_log_prob_key
        (required if entropy_coef != 0.0 else measured)["entropy"] = entropy_key
        (required if rollout_correction is not None else measured)["rollout_log_prob"] = rollout_log_prob_key
        super().__init__(list(required.values()), ["loss"])
        self.input_names = tuple(required)
        self.measured_keys = {name: as_key(key) for name, key in measured.items()}
        self.settings: dict[str, Any] = {
            "clip_eps_low": clip_eps_low,
            "clip_eps_high": clip_eps_high,
            "dual_clip": dual_clip,
            "aggregation": aggregation,
            "length_scale": length_scale,
            "kl_coef": kl_coef,
            "kl_estimator": kl_estimator,
            "entropy_coef": entropy_coef,
            "rollout_correction": rollout_correction,
        }

    def forward(self, tensordict: TensorDictBase, counts: BatchCounts | None = None) -> PolicyLossOutput:
        """Return the loss of ``tensordict`` and its metrics.

        Args:
            tensordict: Batch or a part of one.
            counts: Denominators of the whole optimizer step over all ranks; None counts ``tensordict`` alone.

        Raises:
            KeyError: If a needed key is missing.
            TypeError: If the loss mask is not boolean.
            ValueError: If shapes do not fit.
        """
        inputs = dict(zip(self.input_names, self.read(tensordict), strict=True))
        inputs |= {name: tensordict.get(key, default=None) for name, key in self.measured_keys.items()}
        terms = clipped_policy_objective(**inputs, counts=counts, **self.settings)
        return PolicyLossOutput.from_dict(terms, batch_size=[])


def _check_aggregation(aggregation: str, length_scale: float | None) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")
    # The rules for length_scale live in one place: try them on a mask of one token.
    aggregation_weights(torch.ones(1, 1, 1, dtype=torch.bool), mode=aggregation, length_scale=length_scale)


def _check_finite(**coefs: float) -> None:
    for name, value in coefs.items():
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{name} must be at least 0 and finite, got {value}; 0 switches the term off")
