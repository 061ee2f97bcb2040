"""Masked sums and means, and the one place that knows how a loss is normalised.

Shapes: ``B`` prompts, ``G`` responses per prompt, ``N`` rows (``B * G`` or a part of them), ``T`` response positions.
Masks are boolean; what lies at their False positions is never read, so it may be NaN or inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "group_token_mean"
]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def check_mask(mask: Tensor, *, name: str = "mask") -> None:
    """Refuse anything but a boolean tensor as a mask.

    Args:
        mask: The tensor to check, any shape.
        name: The argument's name in the message.

    Raises:
        TypeError: If ``mask`` is not a tensor of dtype ``torch.bool``.

    Example:
        >>> check_mask(torch.ones(2, 3, dtype=torch.bool))
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a tensor of dtype torch.bool, got {found}; pass {name}.bool()")


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where ``mask`` is True and 0 elsewhere, with a gradient of exactly 0 there.

    Args:
        x: Values, ``[...]``.
        mask: Boolean, broadcastable to the shape of ``x``.

    Returns:
        Tensor like ``x``.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If ``mask`` does not broadcast to the shape of ``x``.

    Example:
        >>> zero_masked(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
        tensor([1., 0.])
    """
    return torch.where(_mask_like(x, mask), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of ``x`` over the True positions of ``mask``.

    Args:
        x: Values, ``[...]``.
        mask: Boolean, broadcastable to the shape of ``x``.
        dim: Dimensions to reduce; all of them by default.

    Returns:
        Tensor of the dtype of ``x``; 0 with a valid graph where nothing is selected.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If ``mask`` does not broadcast to the shape of ``x``.

    Example:
        >>> masked_sum(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False]))
        tensor(3.)
    """
    return zero_masked(x, mask).sum(dim=dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of ``x`` over the True positions of ``mask``.

    Args:
        x: Values, ``[...]``, floating point.
        mask: Boolean, broadcastable to the shape of ``x``.
        dim: Dimensions to reduce; all of them by default.

    Returns:
        Tensor of the dtype of ``x``; 0 with a valid graph where nothing is selected.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If ``mask`` does not broadcast to the shape of ``x``.

    Example:
        >>> x, mask = torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[True, True], [False, False]])
        >>> masked_mean(x, mask, dim=-1)
        tensor([2., 0.])
    """
    num_selected = _mask_like(x, mask).sum(dim=dim).clamp(min=1)
    # bfloat16 cannot hold a count above 256 exactly.
    total = zero_masked(x, mask).sum(dim=dim, dtype=torch.promote_types(x.dtype, torch.float32))
    return (total / num_selected).to(x.dtype)


@dataclass(frozen=True)
class BatchCounts:
    """Denominators of a loss: what the whole optimizer step holds, over all micro-batches and all ranks.

    Args:
        num_tokens: Tokens that count in the loss.
        num_sequences: Responses with at least one such token.
        num_groups: Groups with at least one such token.
        world_size: Data-parallel ranks; the loss is multiplied by it because DDP and FSDP average gradients.

    Each count is a number or a 0-dim tensor; tensors avoid a device synchronisation.

    Raises:
        ValueError: If ``world_size`` is below 1, or a count is negative, not finite or a tensor with dimensions.

    Example:
        >>> BatchCounts(num_tokens=6, num_sequences=3, num_groups=2).num_tokens
        6
    """

    num_tokens: float | Tensor
    num_sequences: float | Tensor
    num_groups: float | Tensor
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be >= 1, got {self.world_size}; one process has world_size=1")
        for name in ("num_tokens", "num_sequences", "num_groups"):
            count = getattr(self, name)
            if isinstance(count, Tensor):
                if count.ndim != 0:
                    raise ValueError(f"{name} must be a number or a 0-dim tensor, got shape {tuple(count.shape)}")
            elif not (math.isfinite(count) and count >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {count}")

    @classmethod
    def from_mask(cls, mask: Tensor, *, world_size: int = 1) -> BatchCounts:
        """Count a batch on one rank.

        Args:
            mask: Boolean loss mask, ``[..., G, T]`` with whole groups, or ``[N, T]``, where each row is its own group.
            world_size: Stored as is; the counts stay this rank's until they are summed over ranks.

        Returns:
            Counts as 0-dim int64 tensors on the mask's device.

        Raises:
            TypeError: If ``mask`` is not boolean.
            ValueError: If ``mask`` has fewer than two dimensions.

        Example:
            >>> mask = torch.tensor([[[True, True], [True, False]], [[False, False], [False, False]]])
            >>> counts = BatchCounts.from_mask(mask)
            >>> int(counts.num_tokens), int(counts.num_sequences), int(counts.num_groups)
            (3, 2, 1)
        """
        check_mask(mask)
        if mask.ndim < 2:
            raise ValueError(f"mask must be [..., G, T] or [N, T], got shape {tuple(mask.shape)}")
        rows = mask.any(dim=-1)
        groups = rows.any(dim=-1) if mask.ndim > 2 else rows
        return cls(mask.sum(), rows.sum(), groups.sum(), world_size)


def aggregation_weights(
    mask: Tensor,
    *,
    mode: str = "token_mean",
    counts: BatchCounts | None = None,
    length_scale: float | None = None,
    group_num_tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Per-token weights :math:`W` such that the loss is :math:`\sum W_{it} L_{it}`.

    With :math:`m` the mask, :math:`n_i` the tokens of row :math:`i`, :math:`n_g` those of its group and :math:`w` the
    world size:

    ========================= ==================================================== =====================================
    mode                      :math:`W_{it}`                                       used by
    ========================= ==================================================== =====================================
    token_mean                :math:`w m_{it} / N_{tokens}`                        DAPO's released code, VAPO
    seq_mean_token_mean       :math:`w m_{it} / (n_i N_{sequences})`               GRPO, GSPO
    seq_mean_token_sum        :math:`w m_{it} / N_{sequences}`
    seq_mean_token_sum_norm   :math:`w m_{it} / (C N_{sequences})`                 Dr.GRPO, :math:`C` = ``length_scale``
    group_token_mean          :math:`w m_{it} / (n_g N_{groups})`                  Eq. 8 of DAPO read literally
    ========================= ==================================================== =====================================

    Rows without a token count in no denominator. Rows must not be split over calls; the groups of ``group_token_mean``
    may be, if ``group_num_tokens`` and ``counts`` describe the whole step. Terms beside the policy loss (KL, entropy)
    and metrics use the same weights.

    Args:
        mask: Boolean loss mask, ``[..., T]``, one response per row; ``[..., G, T]`` for ``group_token_mean``.
        mode: One of the table's names.
        counts: Denominators of the whole step; this mask alone by default.
        length_scale: The constant :math:`C` in tokens, usually the longest allowed response; other modes ignore it.
        group_num_tokens: Tokens in each row's whole group, ``[...]`` (the mask's shape without ``T``).
        dtype: Floating dtype of the result.

    Returns:
        Weights, the shape of ``mask``, 0 where it is False. All 0 if it has no True.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If ``mode`` is unknown, ``length_scale`` is missing or not positive where it is needed, or the
            groups of ``group_token_mean`` cannot be told apart.

    Example:
        >>> aggregation_weights(torch.tensor([[True, False], [True, True]]), mode="seq_mean_token_mean")
        tensor([[0.5000, 0.0000],
                [0.2500, 0.2500]])
    """
    check_mask(mask)
    _check_mode(mask, mode, counts, length_scale, group_num_tokens)
    counts = counts if counts is not None else _own_counts(mask)
    row_tokens = mask.sum(dim=-1, keepdim=True)
    if mode == "token_mean":
        denominator = _as_count(counts.num_tokens, mask, dtype)
    elif mode == "group_token_mean":
        tokens = row_tokens.sum(dim=-2, keepdim=True) if group_num_tokens is None else group_num_tokens.unsqueeze(-1)
        denominator = tokens.clamp(min=1).to(dtype) * _as_count(counts.num_groups, mask, dtype)
    else:
        denominator = _as_count(counts.num_sequences, mask, dtype)
        if mode == "seq_mean_token_mean":
            denominator = denominator * row_tokens.clamp(min=1)
        elif mode == "seq_mean_token_sum_norm" and length_scale is not None:
            denominator = denominator * length_scale
    return mask.to(dtype) * (counts.world_size / denominator)


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    *,
    mode: str = "token_mean",
    counts: BatchCounts | None = None,
    length_scale: float | None = None,
    group_num_tokens: Tensor | None = None,
) -> Tensor:
    r"""Reduce per-token losses to a scalar, :math:`\sum_{it} W_{it} L_{it}` with :func:`aggregation_weights`.

    The results of any split of a step into micro-batches and ranks add up to the full-batch loss (over ranks: average,
    as DDP and FSDP do with gradients), provided that all parts get the same ``counts``.

    Args:
        per_token: Losses, ``[..., T]``.
        mask: Boolean loss mask of the same shape.
        mode: ``token_mean``, ``seq_mean_token_mean``, ``seq_mean_token_sum``, ``seq_mean_token_sum_norm`` or
            ``group_token_mean``.
        counts: Denominators of the whole step; this input alone by default.
        length_scale: Constant of ``seq_mean_token_sum_norm``, in tokens.
        group_num_tokens: See :func:`aggregation_weights`.

    Returns:
        Scalar of the dtype of ``per_token``; 0 with a valid graph and zero gradients if nothing is selected.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If the shapes differ, or as in :func:`aggregation_weights`.

    Example:
        >>> losses = torch.tensor([[1.0, float("nan")], [2.0, 4.0]])
        >>> mask = torch.tensor([[True, False], [True, True]])
        >>> aggregate(losses, mask, mode="seq_mean_token_mean")
        tensor(2.)
    """
    if per_token.shape != mask.shape:
        raise ValueError(
            f"per_token and mask must have one shape, got {tuple(per_token.shape)} and {tuple(mask.shape)}"
        )
    weights = aggregation_weights(
        mask,
        mode=mode,
        counts=counts,
        length_scale=length_scale,
        group_num_tokens=group_num_tokens,
        dtype=torch.promote_types(per_token.dtype, torch.float32),
    )
    return (zero_masked(per_token, mask) * weights).sum().to(per_token.dtype)


def group_num_tokens(mask: Tensor) -> Tensor:
    """Count the tokens of each row's whole group, which ``group_token_mean`` needs once rows are split over calls.

    Args:
        mask: Boolean loss mask of whole groups, ``[..., G, T]``.

    Returns:
        ``[..., G]`` int64, equal within a group.

    Example:
        >>> group_num_tokens(torch.tensor([[[True, True], [True, False]]]))
        tensor([[3, 3]])
    """
    check_mask(mask)
    return mask.sum(dim=(-2, -1), keepdim=True).squeeze(-1).expand(mask.shape[:-1])


def _mask_like(x: Tensor, mask: Tensor) -> Tensor:
    check_mask(mask)
    if mask.shape == x.shape:
        return mask
    try:
        return mask.expand_as(x)
    except RuntimeError as error:
        raise ValueError(f"mask must broadcast to the shape of x, {tuple(x.shape)}, got {tuple(mask.shape)}") from error


def _own_counts(mask: Tensor) -> BatchCounts:
    return BatchCounts.from_mask(mask if mask.ndim > 1 else mask.unsqueeze(0))


def _as_count(count: float | Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """At least 1, so that an empty step divides 0 by 1; counts are whole numbers."""
    return torch.as_tensor(count, device=mask.device).clamp(min=1).to(dtype)


def _check_mode(
    mask: Tensor,
    mode: str,
    counts: BatchCounts | None,
    length_scale: float | None,
    group_num_tokens: Tensor | None,
) -> None:
    if mode not in AGGREGATIONS:
        raise ValueError(f"mode must be one of {', '.join(AGGREGATIONS)}, got {mode!r}")
    if mode == "seq_mean_token_sum_norm" and (length_scale is None or not 0 < length_scale < math.inf):
        raise ValueError(
            f"length_scale must be a positive number for mode='{mode}', got {length_scale}; "
            "pass the longest allowed response in tokens"
        )
    if group_num_tokens is not None and mode == "group_token_mean":
        if counts is None:
            raise ValueError("group_num_tokens needs counts: both must describe the whole optimizer step")
        if group_num_tokens.shape != mask.shape[:-1]:
            raise ValueError(
                f"group_num_tokens must have the shape of mask without its last dimension, {tuple(mask.shape[:-1])}, "
                f"got {tuple(group_num_tokens.shape)}"
            )
    elif mode == "group_token_mean" and mask.ndim < 3:
        raise ValueError(
            f"mode='group_token_mean' needs a mask [..., G, T], got shape {tuple(mask.shape)}; "
            "pass [B, G, T] with whole groups, or group_num_tokens for rows of split groups"
        )
