"""Soft overlong punishment: long responses lose reward before they hit the limit."""

from __future__ import annotations

from typing import final

import torch
from tensordict import TensorDictBase
from tensordict.nn import dispatch

from dapo_components.data.component import Component
from dapo_components.data.keys import Key
from dapo_components.functional.lengths import soft_overlong_punishment

__all__ = ["SoftOverlongPunishment"]


@final
class SoftOverlongPunishment(Component):
    """Add the length penalty of DAPO (arXiv:2503.14476, Eq. 13) to the reward.

    Comes after the group filter, which reads accuracy, and before the advantage. The penalty is 0 up to
    ``max_length - buffer_length`` tokens and ``-penalty`` from ``max_length`` on; it is also written on its own, beside
    the other reward components. With plain tensors, ``SoftOverlongPunishment(...)(reward=r, response_length=n)``
    returns the shaped reward and the penalty.

    Args:
        max_length: Token budget of a response; 20480 in the paper.
        buffer_length: Width of the linear part in tokens; 4096 in the paper.
        penalty: Largest deduction in reward units; 1.0 in the paper, where answers score 1 or -1.
        reward_key: Where the reward is, ``[B, G]``; replaced by the shaped one.
        length_key: Where the response length is, ``[B, G]`` tokens, stop token included.
        component_key: Where the penalty itself goes, ``[B, G]``.

    Raises:
        ValueError: If ``buffer_length`` is not in ``(0, max_length]`` or ``penalty`` is negative.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict(
        ...     {"reward": torch.ones(1, 3), "response_length": torch.tensor([[80, 90, 100]])}, batch_size=[1, 3]
        ... )
        >>> SoftOverlongPunishment(max_length=100, buffer_length=20)(batch)["reward"]
        tensor([[1.0000, 0.5000, 0.0000]])
    """

    def __init__(
        self,
        max_length: int,
        buffer_length: int,
        penalty: float = 1.0,
        *,
        reward_key: Key = "reward",
        length_key: Key = "response_length",
        component_key: Key = ("rewards", "soft_overlong"),
    ) -> None:
        # The rules live with the function: an invalid setting fails here, not after the first rollout.
        soft_overlong_punishment(torch.zeros(1), max_length=max_length, buffer_length=buffer_length, penalty=penalty)
        super().__init__([reward_key, length_key], [reward_key, component_key])
        self.max_length, self.buffer_length, self.penalty = max_length, buffer_length, penalty

    @dispatch()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the shaped reward and the penalty to ``tensordict`` and return it."""
        reward, length = self.read(tensordict)
        reward = reward if reward.is_floating_point() else reward.float()  # an integer cannot hold a fraction
        punishment = soft_overlong_punishment(
            length, max_length=self.max_length, buffer_length=self.buffer_length, penalty=self.penalty
        ).to(reward.dtype)
        return self.write(tensordict, reward + punishment, punishment)
