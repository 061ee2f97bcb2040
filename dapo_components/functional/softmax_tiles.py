r"""A softmax over the vocabulary, tile by tile: statistics forward, gradient backward.

The parts from which :mod:`~dapo_components.functional.logits_log_probs` and
:mod:`~dapo_components.functional.head_log_probs` are made. Logits pass through tiles that fit a processor's cache;
per row only the largest logit, the sum of exponentials relative to it and the entropy survive from forward to backward.

Shapes: ``N`` rows (tokens to score), ``V`` vocabulary. With :math:`p` the softmax of a row :math:`x`, :math:`y` its
token and :math:`H` its entropy in nats, the gradients are

.. math::
    \frac{\partial \log p_y}{\partial x_k} = 1[k = y] - p_k, \qquad
    \frac{\partial H}{\partial x_k} = -p_k (\log p_k + H).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# exp(x) as exp2(x * log2(e)): where exp goes through a vendor's vector library it takes up to three times as long.
_LOG2_E = math.log2(math.e)
# So far below the peak a probability is exactly 0; a finite number keeps 0 * -inf out of the entropy.
_LOWEST = -1e5

Rows = slice | Tensor


def tile_elements(device: torch.device) -> int:
    """Elements of a tile.

    On a CPU the last-level cache should hold it through all passes; smaller ones would fit the caches of single cores,
    but a machine that is busy with other work loses more at the barrier after each operation. A GPU wants long kernels.
    """
    return 2**21 if device.type == "cpu" else 2**25


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest dtype among the tensors, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def row_slices(num_rows: int, chunk_size: int) -> Iterator[slice]:
    """Cut all rows into slices."""
    for start in range(0, num_rows, chunk_size):
        yield slice(start, min(start + chunk_size, num_rows))


def row_chunks(num_rows: int, selected: Tensor | None, chunk_size: int) -> Iterator[Rows]:
    """Cut the selected row indices into pieces, or all rows into slices, which give views instead of copies."""
    if selected is None:
        yield from row_slices(num_rows, chunk_size)
    elif selected.numel() > 0:
        yield from selected.split(chunk_size)


def active_rows(gradients: Sequence[Tensor | None], selected: Tensor | None) -> Tensor | None:
    """Indices of rows with a gradient that is not 0, among the selected; None for all rows.

    Skipping the others saves their work, and NaN or inf in them cannot turn a gradient of 0 into NaN.
    """
    active = torch.stack([gradient != 0 for gradient in gradients if gradient is not None]).any(dim=0)
    if selected is not None:
        active &= torch.zeros_like(active).index_fill_(0, selected, True)
    indices = active.nonzero().squeeze(1)
    return None if indices.numel() == active.numel() else indices


class Scratch:
    """Buffers that are made once and used for every tile.

    Args:
        num_elements: Elements of the largest tile.
        dtype: Floating dtype of the tiles.
        device: Where they live.
    """

    def __init__(self, num_elements: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_elements, self.dtype, self.device = num_elements, dtype, device
        self._buffers: dict[int, Tensor] = {}

    def shaped(self, index: int, shape: torch.Size) -> Tensor:
        """Buffer number ``index``, viewed in ``shape``; its contents are whatever was there."""
        if index not in self._buffers:
            self._buffers[index] = torch.empty(self.num_elements, dtype=self.dtype, device=self.device)
        return self._buffers[index][: shape.numel()].view(shape)


class SoftmaxStatistics:
    """Running statistics of ``N`` softmaxes whose logits arrive in tiles.

    Args:
        tokens: Vocabulary index to score in each row, ``[N]``.
        dtype: Floating dtype of the statistics.
        with_entropy: Whether to keep what the entropy needs.
    """

    def __init__(self, tokens: Tensor, *, dtype: torch.dtype, with_entropy: bool) -> None:
        self.tokens = tokens
        self.peak = torch.full(tokens.shape, torch.finfo(dtype).min, dtype=dtype, device=tokens.device)
        self.total = torch.zeros_like(self.peak)
        self.target = torch.zeros_like(self.peak)
        self.weighted = torch.zeros_like(self.peak) if with_entropy else None

    def absorb(self, tile: Tensor, rows: Rows, start: int, scratch: Scratch) -> None:
        """Take in the logits ``tile`` of ``rows`` for the vocabulary from ``start`` on.

        Overwrites the scratch buffers 0, which ``tile`` may be, and 1.
        """
        index, inside = _locate(self.tokens[rows], start, tile.shape[1])
        self.target[rows] = torch.where(inside, tile.gather(1, index).squeeze(1), self.target[rows])
        peak = torch.maximum(self.peak[rows], tile.amax(dim=1))
        shift = (self.peak[rows] - peak).clamp(min=_LOWEST)
        below = torch.sub(tile, peak.unsqueeze(1), out=scratch.shaped(0, tile.shape))
        if self.weighted is None:
            exponential = below.mul_(_LOG2_E).exp2_()
        else:
            below.clamp_(min=_LOWEST)
            exponential = torch.mul(below, _LOG2_E, out=scratch.shaped(1, tile.shape)).exp2_()
            self.weighted[rows] = (self.weighted[rows] + self.total[rows] * shift) * shift.exp()
        self.peak[rows] = peak
        self.total[rows] = self.total[rows] * shift.exp() + exponential.sum(dim=1)
        if self.weighted is not None:
            self.weighted[rows] += exponential.mul_(below).sum(dim=1)

    def log_prob(self) -> Tensor:
        """Log-prob of each row's token, ``[N]``; the peak is taken off first, so large logits lose no digits."""
        return (self.target - self.peak) - self.total.log()

    def entropy(self) -> Tensor | None:
        """Entropy of each row in nats, ``[N]``, or None without ``with_entropy``."""
        return None if self.weighted is None else self.total.log() - self.weighted / self.total


class RowGradient:
    """Gradient of a loss with respect to tiles of logits, given its gradient with respect to the rows' results.

    Args:
        tokens: As in the forward pass, ``[N]`` like all the others.
        peak: Largest logit.
        total: Sum of ``exp(logit - peak)``.
        entropy: Entropy, or None if there is no gradient for it.
        grad_log_prob: Gradient with respect to the log-probs, or None.
        grad_entropy: Gradient with respect to the entropies, or None.
    """

    def __init__(
        self,
        tokens: Tensor,
        peak: Tensor,
        total: Tensor,
        entropy: Tensor | None,
        grad_log_prob: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        self.tokens, self.peak = tokens, peak
        self.at_token = torch.zeros_like(peak) if grad_log_prob is None else grad_log_prob.to(peak.dtype)
        self.slope = None
        offset = self.at_token
        if grad_entropy is not None and entropy is not None:
            self.slope = -grad_entropy.to(peak.dtype) / total
            offset = offset + grad_entropy.to(peak.dtype) * (entropy - total.log())
        self.offset = -offset / total

    def tile(self, tile: Tensor, rows: Rows, start: int, out: Tensor, scratch: Scratch) -> Tensor:
        """Gradient for the logits ``tile``, written to ``out``, which may be ``tile``; overwrites scratch buffer 1."""
        torch.sub(tile, self.peak[rows].unsqueeze(1), out=out)
        offset = self.offset[rows].unsqueeze(1)
        if self.slope is None:
            out.mul_(_LOG2_E).exp2_().mul_(offset)
        else:
            out.clamp_(min=_LOWEST)
            exponential = torch.mul(out, _LOG2_E, out=scratch.shaped(1, tile.shape)).exp2_()
            out.mul_(self.slope[rows].unsqueeze(1)).add_(offset).mul_(exponential)
        index, inside = _locate(self.tokens[rows], start, tile.shape[1])
        return out.scatter_add_(1, index, (self.at_token[rows] * inside).unsqueeze(1))


def _locate(tokens: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Column of each token in a tile, ``[n, 1]`` and always valid, and whether the token is in the tile, ``[n]``."""
    column = tokens - start
    return column.clamp(0, width - 1).unsqueeze(1), (column >= 0) & (column < width)
