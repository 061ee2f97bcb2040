"""Advantages from the rewards of a group: ``B`` prompts, ``G`` responses per prompt."""

from __future__ import annotations

from typing import final

from tensordict import TensorDictBase
from tensordict.nn import dispatch

from dapo_components.data.component import Component
from dapo_components.data.keys import Key
from dapo_components.functional.advantages import (
    check_group_normalization,
    group_normalized_advantage,
    leave_one_out_advantage,
)

__all__ = ["GroupNormalizedAdvantage", "LeaveOneOutAdvantage"]


@final
class GroupNormalizedAdvantage(Component):
    """Write rewards relative to their group's mean, in units of its standard deviation (GRPO, DAPO Eq. 9).

    Reads the shaped reward, so it comes after reward shaping and after the group filter. With plain tensors, call it
    with the reward alone: ``GroupNormalizedAdvantage()(reward=reward)`` returns the advantage.

    Args:
        scale: ``"std"``, or ``"none"`` for the difference to the mean alone (Dr.GRPO).
        eps: Added to the standard deviation, in reward units.
        ddof: 1 divides the sum of squares by ``n - 1``, 0 by ``n``.
        rtol: A group counts as equal where ``max - min <= rtol * max(abs(reward))``.
        reward_key: Where the reward is, ``[B, G]``.
        advantage_key: Where the advantage goes, ``[B, G]``.
        valid_key: Where usable responses are marked, ``[B, G]`` bool; None uses all. Truncated responses are usable: a
            response cut off by the limit is a fair sample of what the policy does under that limit.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"reward": torch.tensor([[1.0, -1.0], [1.0, 1.0]])}, batch_size=[2, 2])
        >>> GroupNormalizedAdvantage()(batch)["advantage"]
        tensor([[ 0.7071, -0.7071],
                [ 0.0000,  0.0000]])
    """

    def __init__(
        self,
        *,
        scale: str = "std",
        eps: float = 1e-6,
        ddof: int = 1,
        rtol: float = 0.0,
        reward_key: Key = "reward",
        advantage_key: Key = "advantage",
        valid_key: Key | None = None,
    ) -> None:
        check_group_normalization(scale=scale, eps=eps, ddof=ddof, rtol=rtol)
        super().__init__([reward_key] if valid_key is None else [reward_key, valid_key], [advantage_key])
        self.scale, self.eps, self.ddof, self.rtol = scale, eps, ddof, rtol

    @dispatch()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the advantage to ``tensordict`` and return it."""
        reward, *valid = self.read(tensordict)
        advantage = group_normalized_advantage(
            reward, scale=self.scale, eps=self.eps, ddof=self.ddof, rtol=self.rtol, valid=next(iter(valid), None)
        )
        return self.write(tensordict, advantage)


@final
class LeaveOneOutAdvantage(Component):
    """Write every reward minus the mean of the other rewards of its group (RLOO, arXiv:2402.14740).

    With plain tensors, ``LeaveOneOutAdvantage()(reward=reward)`` returns the advantage.

    Args:
        reward_key: Where the reward is, ``[B, G]``.
        advantage_key: Where the advantage goes, ``[B, G]``.
        valid_key: Where usable responses are marked, ``[B, G]`` bool; None uses all.

    Example:
        >>> import torch
        >>> LeaveOneOutAdvantage()(reward=torch.tensor([[1.0, 0.0, 0.0]]))
        tensor([[ 1.0000, -0.5000, -0.5000]])
    """

    def __init__(
        self,
        *,
        reward_key: Key = "reward",
        advantage_key: Key = "advantage",
        valid_key: Key | None = None,
    ) -> None:
        super().__init__([reward_key] if valid_key is None else [reward_key, valid_key], [advantage_key])

    @dispatch()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the advantage to ``tensordict`` and return it."""
        reward, *valid = self.read(tensordict)
        return self.write(tensordict, leave_one_out_advantage(reward, valid=next(iter(valid), None)))
