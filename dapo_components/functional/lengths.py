"""What the length of a response does to its reward and to its place in the loss.

Shapes: ``...`` any leading dimensions (usually ``[B, G]``), ``T`` response positions. Lengths are in tokens, without
the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dapo_components.functional.reductions import check_mask


def soft_overlong_punishment(length: Tensor, *, max_length: int, buffer_length: int, penalty: float = 1.0) -> Tensor:
    r"""Penalise responses that run into the last ``buffer_length`` tokens of the budget.

    Eq. 13 of DAPO (arXiv:2503.14476): 0 up to :math:`L_{max} - L_{cache}` tokens, then linear, and exactly
    ``-penalty`` from :math:`L_{max}` tokens on. The result is added to the reward before the group statistics.

    Args:
        length: Response length in tokens, stop token included, ``[...]``.
        max_length: Token budget of a response, :math:`L_{max}`; 20480 in the paper.
        buffer_length: Width of the linear part in tokens, :math:`L_{cache}`; 4096 in the paper.
        penalty: Largest deduction, in units of reward.

    Returns:
        Tensor ``[...]`` with values in ``[-penalty, 0]``, float32 if ``length`` is integral.

    Raises:
        ValueError: If ``buffer_length`` is not in ``(0, max_length]`` or ``penalty`` is negative or not finite.

    Example:
        >>> soft_overlong_punishment(torch.tensor([80, 90, 120]), max_length=100, buffer_length=20)
        tensor([ 0.0000, -0.5000, -1.0000])
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(f"buffer_length must be in (0, max_length={max_length}], got {buffer_length}")
    if not (math.isfinite(penalty) and penalty >= 0):
        raise ValueError(f"penalty must be finite and >= 0, got {penalty}; it is the size of the deduction")
    remaining = max_length - buffer_length - length
    return (remaining / buffer_length).clamp(-1.0, 0.0) * penalty


def truncation_mask(tokens: Tensor, mask: Tensor, *, stop_token_ids: Sequence[int]) -> Tensor:
    """Rows whose last token is no stop token, that is, which the length limit cut off.

    For engines that report no finish reason. A response that ends with its stop token exactly at the limit is not
    truncated, which ``length == max_length`` would claim.

    Args:
        tokens: Response ids as sampled, stop token included, ``[..., T]``.
        mask: Boolean, ``[..., T]``: True at response tokens.
        stop_token_ids: Ids that end a response.

    Returns:
        Boolean ``[...]``; False for a row without a token.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If the shapes differ or ``stop_token_ids`` is empty.

    Example:
        >>> tokens = torch.tensor([[5, 2, 0], [5, 6, 7]])
        >>> truncation_mask(tokens, tokens != 0, stop_token_ids=[2])
        tensor([False,  True])
    """
    check_mask(mask)
    if tokens.shape != mask.shape:
        raise ValueError(f"tokens and mask must have one shape, got {tuple(tokens.shape)} and {tuple(mask.shape)}")
    if len(stop_token_ids) == 0:
        raise ValueError("stop_token_ids must hold at least one id, got none; every row would count as truncated")
    if tokens.shape[-1] == 0:
        return torch.zeros(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
    position = torch.arange(1, tokens.shape[-1] + 1, device=tokens.device)
    last = (position * mask).argmax(dim=-1, keepdim=True)
    stops = torch.isin(tokens.gather(-1, last), torch.as_tensor(list(stop_token_ids), device=tokens.device))
    return mask.any(dim=-1) & ~stops.squeeze(-1)


def mask_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """Take truncated rows out of a loss mask (overlong filtering, Section 3.4 of DAPO).

    Such a row counts neither in the loss nor in its denominator; whether it counts in the group's statistics is
    decided where the advantage is computed.

    Args:
        mask: Boolean loss mask, ``[..., T]``.
        truncated: Boolean, ``[...]``: True where the length limit ended the response.

    Returns:
        Boolean ``[..., T]``.

    Raises:
        TypeError: If an argument is not boolean.
        ValueError: If ``truncated`` does not have one value per row.

    Example:
        >>> mask_truncated(torch.tensor([[True, True], [True, False]]), torch.tensor([True, False]))
        tensor([[False, False],
                [ True, False]])
    """
    check_mask(mask)
    check_mask(truncated, name="truncated")
    if truncated.shape != mask.shape[:-1]:
        raise ValueError(
            f"truncated must have the shape of mask without its last dimension, {tuple(mask.shape[:-1])}, "
            f"got {tuple(truncated.shape)}"
        )
    return mask & ~truncated.unsqueeze(-1)
