"""Which groups carry a learning signal.

Shapes: ``G`` responses of one prompt along the last dimension, ``...`` any leading dimensions (usually ``[B]``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_components.functional.reductions import check_mask


def group_spread(score: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Largest minus smallest score of each group.

    A range, not a standard deviation: equal scores give exactly 0 even where their mean is rounded, as that of seven
    times 0.7 is in float32.

    Args:
        score: One score per response, ``[..., G]``.
        valid: Boolean, ``[..., G]``: members that count; all by default. What lies at the others is never read.

    Returns:
        Tensor ``[...]`` of the floating dtype of ``score`` (float32 for integers and booleans); 0 for a group with
        fewer than two members that count, NaN where one of them is NaN.

    Raises:
        TypeError: If ``valid`` is not boolean.
        ValueError: If ``score`` has no dimension, or ``valid`` another shape.

    Example:
        >>> group_spread(torch.tensor([[0.7, 0.7, 0.7], [0.0, 1.0, 1.0]]))
        tensor([0., 1.])
    """
    if score.ndim == 0:
        raise ValueError("score must be [..., G], got a 0-dim tensor")
    if valid is None:
        valid = torch.ones_like(score, dtype=torch.bool)
    check_mask(valid, name="valid")
    if valid.shape != score.shape:
        raise ValueError(f"valid must have the shape of score, {tuple(score.shape)}, got {tuple(valid.shape)}")
    if not score.is_floating_point():
        score = score.to(torch.float32)
    if score.shape[-1] < 2:
        return score.new_zeros(score.shape[:-1])
    highest = score.masked_fill(~valid, -torch.inf).amax(dim=-1)
    lowest = score.masked_fill(~valid, torch.inf).amin(dim=-1)
    return torch.where(valid.sum(dim=-1) > 1, highest - lowest, score.new_zeros(()))


def informative_mask(score: Tensor, *, valid: Tensor | None = None, atol: float = 1e-6) -> Tensor:
    """Groups whose members differ in score; the others have advantage 0 and teach nothing.

    The keep rule of DAPO's dynamic sampling (Eq. 11 of arXiv:2503.14476) for scores of any kind: with 0/1 scores it is
    ``0 < number correct < G``.

    Args:
        score: Correctness of each response before any shaping by length, ``[..., G]``.
        valid: Boolean, ``[..., G]``: members that count; all by default.
        atol: Scores this close are equal.

    Returns:
        Boolean ``[...]``; False for a group with fewer than two members that count or with NaN among them.

    Raises:
        TypeError: If ``valid`` is not boolean.
        ValueError: If ``atol`` is negative, or as in :func:`group_spread`.

    Example:
        >>> informative_mask(torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
        tensor([False,  True, False])
    """
    if not atol >= 0:
        raise ValueError(f"atol must be >= 0, got {atol}")
    return group_spread(score, valid=valid) > atol
