"""Policy surrogates: per-token losses of an importance ratio and an advantage.

Every surrogate takes the log of the ratio, already masked by ``dapo_components.functional.ratios``, and returns a
loss per token that ``dapo_components.functional.reductions.aggregate`` turns into a scalar. Notation: ``B`` prompts,
``G`` responses per prompt, ``N`` responses, ``T`` response positions, ``r = exp(log_ratio)``, ``A`` the advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_components.functional.precision import at_least_float32
from dapo_components.functional.reductions import zero_masked

__all__ = ["active_clip_masks", "clipped_surrogate", "expand_to_tokens"]


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.28,
    dual_clip: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the clipped policy loss of every token, with separate bounds for raising and lowering a probability.

    ``L = max(-A r, -A clip(r, 1 - clip_eps_low, 1 + clip_eps_high))``: PPO (arXiv:1707.06347) with the two bounds of
    DAPO's clip-higher (arXiv:2503.14476, Eq. 10); equal bounds give PPO. With ``dual_clip = c`` (arXiv:1912.09729),
    ``L = min(L, -A c)`` where ``A < 0``, which bounds the loss of a bad action that became much likelier.
    The gradient with respect to ``log_ratio`` is ``-A r`` where no bound is active and 0 where one is.

    Args:
        log_ratio: ``[..., T]`` log of new over old probability; masked positions hold 0.
        advantage: ``[...]``, one value per response, or ``[..., T]``; no gradient flows into it.
        clip_eps_low: A probability is pushed down no further than ``1 - clip_eps_low`` times the old one. DAPO: 0.2.
        clip_eps_high: A probability is pushed up no further than ``1 + clip_eps_high`` times the old one. DAPO: 0.28.
        dual_clip: Bound ``c > 1`` on the ratio where the advantage is negative; common values are 3 and 10. DAPO: None.
        mask: ``[..., T]`` bool; elsewhere loss and gradient are 0 whatever the inputs hold. None keeps every position.

    Returns:
        ``[..., T]`` loss to minimise, float32 or wider.

    Raises:
        ValueError: If a bound is out of range or the shapes do not fit.

    Example:
        >>> log_ratio = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
        >>> clipped_surrogate(log_ratio, torch.tensor([1.0, -1.0, 1.0, -1.0]))
        tensor([-1.2800,  1.5000, -0.5000,  0.8000])
    """
    check_clip_bounds(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, dual_clip=dual_clip)
    log_ratio, advantage = _masked_terms(log_ratio, advantage, mask)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped_ratio)
    if dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * dual_clip), loss)


def active_clip_masks(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.28,
    dual_clip: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each bound of ``clipped_surrogate`` decides the loss, which is where it stops the gradient.

    A ratio outside the band is counted only if the clipped branch is the active one: above the band with a positive
    advantage, below it with a negative one. A token without advantage has nothing to clip.

    Args:
        log_ratio: As in ``clipped_surrogate``.
        advantage: As in ``clipped_surrogate``.
        clip_eps_low: As in ``clipped_surrogate``.
        clip_eps_high: As in ``clipped_surrogate``.
        dual_clip: As in ``clipped_surrogate``.
        mask: As in ``clipped_surrogate``.

    Returns:
        Three ``[..., T]`` bool masks, disjoint: lower bound, upper bound, dual clip.

    Raises:
        ValueError: If a bound is out of range or the shapes do not fit.

    Example:
        >>> log_ratio = torch.tensor([0.5, 0.5, 1.5, 1.5]).log()
        >>> low, high, dual = active_clip_masks(log_ratio, torch.tensor([1.0, -1.0, 1.0, -1.0]))
        >>> low, high
        (tensor([False,  True, False, False]), tensor([False, False,  True, False]))
    """
    check_clip_bounds(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, dual_clip=dual_clip)
    log_ratio, advantage = _masked_terms(log_ratio.detach(), advantage, mask)
    ratio = log_ratio.exp()
    low = (advantage < 0) & (ratio < 1.0 - clip_eps_low)
    high = (advantage > 0) & (ratio > 1.0 + clip_eps_high)
    dual = torch.zeros_like(low) if dual_clip is None else (advantage < 0) & (ratio > dual_clip)
    return low, high, dual


def expand_to_tokens(advantage: Tensor, log_ratio: Tensor) -> Tensor:
    """Return ``advantage`` with the shape of ``log_ratio``: one value per response becomes one per token.

    Args:
        advantage: ``[...]`` or ``[..., T]``.
        log_ratio: ``[..., T]``.

    Returns:
        A view of shape ``[..., T]``.

    Raises:
        ValueError: If the shape is neither that of ``log_ratio`` nor that without its last dimension.

    Example:
        >>> expand_to_tokens(torch.tensor([1.0, -1.0]), torch.zeros(2, 3))
        tensor([[ 1.,  1.,  1.],
                [-1., -1., -1.]])
    """
    if advantage.shape == log_ratio.shape:
        return advantage
    if advantage.shape == log_ratio.shape[:-1]:
        return advantage.unsqueeze(-1).expand_as(log_ratio)
    raise ValueError(
        f"advantage must have the shape {tuple(log_ratio.shape)} of the log-probs or {tuple(log_ratio.shape[:-1])}, "
        f"one value per response, got {tuple(advantage.shape)}; select rows of both with the same index"
    )


def check_clip_bounds(*, clip_eps_low: float, clip_eps_high: float, dual_clip: float | None) -> None:
    """Check the bounds of ``clipped_surrogate``; blocks call it in their constructor.

    Raises:
        ValueError: If one is out of range; the message names it, its rule and its value.
    """
    if not 0.0 <= clip_eps_low < 1.0:
        raise ValueError(f"clip_eps_low must be in [0, 1), got {clip_eps_low}; the paper uses 0.2")
    if not 0.0 <= clip_eps_high < float("inf"):
        raise ValueError(f"clip_eps_high must be at least 0 and finite, got {clip_eps_high}; the paper uses 0.28")
    if dual_clip is not None and not 1.0 < dual_clip < float("inf"):
        raise ValueError(f"dual_clip must be finite and above 1, got {dual_clip}; use 3.0 or 10.0, or None for none")


def _masked_terms(log_ratio: Tensor, advantage: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Bring both terms to one shape and at least float32, 0 where masked: 0 * inf in a backward pass would be NaN."""
    log_ratio = at_least_float32(log_ratio)
    advantage = expand_to_tokens(advantage.detach(), log_ratio).to(log_ratio.dtype)
    if mask is None:
        return log_ratio, advantage
    return zero_masked(log_ratio, mask), zero_masked(advantage, mask)
