"""Overlong filtering: responses cut off by the length limit leave the loss."""

from __future__ import annotations

from typing import final

from tensordict import TensorDictBase
from tensordict.nn import dispatch

from dapo_components.data.component import Component
from dapo_components.data.keys import Key
from dapo_components.functional.lengths import mask_truncated

__all__ = ["OverlongFilter"]


@final
class OverlongFilter(Component):
    """Set the loss mask of truncated responses to False (overlong filtering, DAPO Section 3.4 and Table 1).

    Comes after the advantage: a truncated response still counts in the statistics of its group, but neither in the loss
    nor in its denominator. With plain tensors, ``OverlongFilter()(loss_mask=mask, truncated=truncated)`` returns the
    new mask.

    Args:
        mask_key: Where the loss mask is, ``[B, G, T]`` bool; replaced, not changed in place.
        truncated_key: Where truncated responses are marked, ``[B, G]`` bool: cut off by the limit, not merely as long.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> mask = torch.ones(1, 2, 3, dtype=torch.bool)
        >>> batch = TensorDict({"loss_mask": mask, "truncated": torch.tensor([[False, True]])}, batch_size=[1, 2])
        >>> OverlongFilter()(batch)["loss_mask"]
        tensor([[[ True,  True,  True],
                 [False, False, False]]])
    """

    def __init__(self, *, mask_key: Key = "loss_mask", truncated_key: Key = "truncated") -> None:
        super().__init__([mask_key, truncated_key], [mask_key])

    @dispatch()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the loss mask to ``tensordict`` and return it."""
        mask, truncated = self.read(tensordict)
        return self.write(tensordict, mask_truncated(mask, truncated))
