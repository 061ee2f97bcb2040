"""The role of a group filter, its verdict, and how filters are combined.

A filter looks at a batch of ``B`` groups and says which to keep; it never changes the batch. Applying a decision is one
index: ``batch[decision.keep]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["FilterChain", "FilterDecision", "GroupFilter"]


@dataclass(frozen=True)
class FilterDecision:
    """Which groups of a batch to keep, and why the others go.

    Args:
        keep: ``[B]`` bool, on the CPU or any other device.
        reasons: One text per group, empty where it is kept. Equal causes have equal texts, so that they can be counted.

    Raises:
        TypeError: If ``keep`` is not boolean.
        ValueError: If the shapes do not fit, or a reason is missing or given to a kept group.

    Example:
        >>> decision = FilterDecision(torch.tensor([True, False]), ["", "accuracy all 0"])
        >>> decision.num_kept, dict(decision.dropped)
        (1, {'accuracy all 0': 1})
    """

    keep: Tensor
    reasons: list[str]

    def __post_init__(self) -> None:
        if self.keep.dtype != torch.bool:
            raise TypeError(f"keep must be a tensor of dtype torch.bool, got {self.keep.dtype}; pass keep.bool()")
        if self.keep.shape != (len(self.reasons),):
            raise ValueError(
                f"keep must be [B] with one reason per group, got shape {tuple(self.keep.shape)} and "
                f"{len(self.reasons)} reasons"
            )
        kept = self.keep.tolist()
        if kept != [not reason for reason in self.reasons]:
            index = next(i for i, reason in enumerate(self.reasons) if kept[i] is bool(reason))
            rule = "have no reason" if kept[index] else "have a reason"
            raise ValueError(
                f"group {index} must {rule} because keep[{index}] is {kept[index]}, got {self.reasons[index]!r}"
            )

    @property
    def num_kept(self) -> int:
        """Number of groups to keep."""
        return self.reasons.count("")

    @property
    def dropped(self) -> Counter[str]:
        """Number of dropped groups by reason."""
        return Counter(reason for reason in self.reasons if reason)


class GroupFilter(Protocol):
    """Anything that decides about the groups of a batch.

    A filter reads correctness before any shaping: two wrong answers of different length must not keep a group alive.
    """

    def __call__(self, batch: TensorDictBase) -> FilterDecision:
        """Decide about a batch of size ``[B, G]`` without changing it."""
        ...


@final
class FilterChain:
    """Keep the groups that every filter keeps; the first filter that drops a group gives the reason.

    Args:
        filters: Filters in the order in which they are asked. Without any, every group is kept.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"accuracy": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}, batch_size=[2, 2])
        >>> FilterChain([])(batch).keep
        tensor([True, True])
    """

    def __init__(self, filters: Sequence[GroupFilter]) -> None:
        self.filters = tuple(filters)
        for index, group_filter in enumerate(self.filters):
            if not callable(group_filter):
                raise ValueError(f"filters[{index}] must be callable with a batch, got {group_filter!r}")

    def __call__(self, batch: TensorDictBase) -> FilterDecision:
        """Decide about a batch of size ``[B, G]``."""
        keep = torch.ones(batch.batch_size[0], dtype=torch.bool, device=batch.device)
        reasons = [""] * batch.batch_size[0]
        for decision in (group_filter(batch) for group_filter in self.filters):
            keep = keep & decision.keep.to(keep.device)
            reasons = [first or later for first, later in zip(reasons, decision.reasons, strict=True)]
        return FilterDecision(keep, reasons)
