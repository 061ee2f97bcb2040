"""KL to a reference policy as part of the reward."""

from __future__ import annotations

from typing import final

from tensordict import TensorDictBase
from tensordict.nn import dispatch

from dapo_components.data.component import Component
from dapo_components.data.keys import Key
from dapo_components.functional.kl import check_kl_estimator, kl_penalty
from dapo_components.functional.reductions import masked_sum

__all__ = ["ReferenceKLPenalty"]


@final
class ReferenceKLPenalty(Component):
    """Subtract ``coef`` times the KL of a response to the reference policy from its reward.

    ``reward_i -= coef * sum_t kl(old_log_prob_it, ref_log_prob_it)`` over the tokens of the response. Placed before
    the group statistics, it is divided by their standard deviation as the rest of the reward is, so it is not the same
    objective as a KL term in the loss. In the reward, ``k1`` gives the gradient of the reverse KL.

    Args:
        coef: Weight, in reward units per nat.
        estimator: ``k1``, ``k2``, ``k3`` or ``abs``; see ``kl_penalty``.
        log_prob_key: Log-probs under the policy that sampled, ``[..., T]``.
        ref_log_prob_key: Log-probs under the reference, ``[..., T]``.
        mask_key: Tokens of the response, ``[..., T]`` bool.
        reward_key: Reward to change, ``[...]``.

    Raises:
        ValueError: If ``coef`` is negative or the estimator unknown.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict(
        ...     {
        ...         "old_log_prob": torch.tensor([[-1.0, -2.0]]),
        ...         "ref_log_prob": torch.tensor([[-1.5, -2.5]]),
        ...         "response_mask": torch.ones(1, 2, dtype=torch.bool),
        ...         "reward": torch.tensor([1.0]),
        ...     },
        ...     batch_size=[1],
        ... )
        >>> ReferenceKLPenalty(coef=0.1)(batch)["reward"]
        tensor([0.9000])
    """

    def __init__(
        self,
        *,
        coef: float,
        estimator: str = "k1",
        log_prob_key: Key = "old_log_prob",
        ref_log_prob_key: Key = "ref_log_prob",
        mask_key: Key = "response_mask",
        reward_key: Key = "reward",
    ) -> None:
        if not coef >= 0:
            raise ValueError(f"coef must be >= 0, got {coef}")
        check_kl_estimator(estimator=estimator)
        super().__init__([log_prob_key, ref_log_prob_key, mask_key, reward_key], [reward_key])
        self.coef, self.estimator = coef, estimator

    @dispatch()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the batch with a changed reward."""
        log_prob, ref_log_prob, mask, reward = self.read(tensordict)
        kl = masked_sum(kl_penalty(log_prob, ref_log_prob, estimator=self.estimator), mask, dim=-1)
        return self.write(tensordict, reward - self.coef * kl)
