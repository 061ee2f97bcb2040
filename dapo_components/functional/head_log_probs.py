"""The autograd function behind :func:`dapo_components.functional.log_probs.linear_log_probs`.

Shapes: ``N`` tokens to score, ``D`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dapo_components.functional.softmax_tiles import (
    RowGradient,
    Scratch,
    SoftmaxStatistics,
    active_rows,
    compute_dtype,
    row_slices,
    tile_elements,
)

# Columns of a tile: narrower ones would make the products inefficient however many tokens a chunk has.
_NARROWEST = 64


class HeadLogProbs(torch.autograd.Function):
    """Log-probs and entropies of ``softmax((hidden @ weight.T + bias) / temperature)``.

    Both directions walk over tiles of some vocabulary columns and ``chunk_size`` tokens. The vocabulary is the outer
    loop: a stretch of ``weight`` is converted once, and its gradient is summed up in one place in full precision.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Score ``tokens`` [N], given ``hidden`` [N, D], ``weight`` [V, D] and ``bias`` [V]."""
        head = _Head(hidden, weight, bias, temperature, chunk_size)
        statistics = SoftmaxStatistics(tokens, dtype=head.dtype, with_entropy=with_entropy)
        for columns, weight_tile in head.columns():
            for rows in row_slices(hidden.shape[0], chunk_size):
                tile = head.logits(head.chunk(rows), weight_tile, columns)
                statistics.absorb(tile, rows, columns.start, head.scratch)
        entropy = statistics.entropy()
        ctx.save_for_backward(hidden, weight, bias, tokens, statistics.peak, statistics.total, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return statistics.log_prob(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients for ``hidden``, ``weight`` and ``bias``, in their dtypes."""
        if all(grad is None for grad in grad_outputs):
            return (None,) * 7
        hidden, weight, bias, *row_state = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        active = active_rows(grad_outputs, None)
        row_state += [None if grad is None else grad / ctx.temperature for grad in grad_outputs]
        gradient = RowGradient(*(_take(state, active) for state in row_state))
        head = _Head(hidden if active is None else hidden[active], weight, bias, ctx.temperature, ctx.chunk_size)
        some = head.hidden.shape[0] > 0
        grad_hidden = torch.zeros_like(head.hidden, dtype=head.dtype) if needs_hidden else None
        grad_weight = (torch.empty_like if some else torch.zeros_like)(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.dtype) if needs_bias else None
        for columns, weight_tile in head.columns() if some else ():
            _add_columns(head, gradient, columns, weight_tile, (grad_hidden, grad_weight, grad_bias))
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
            if active is not None:
                grad_hidden = torch.zeros_like(hidden).index_copy_(0, active, grad_hidden)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


class _Head:
    """Makes the tiles of logits, the same ones in both directions.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        temperature: Divides the logits.
        chunk_size: Most tokens of a tile.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, chunk_size: int
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.temperature, self.chunk_size = temperature, chunk_size
        self.dtype = compute_dtype(hidden, weight)
        num_rows = max(1, min(chunk_size, hidden.shape[0]))
        self.width = min(weight.shape[0], max(_NARROWEST, tile_elements(hidden.device) // num_rows))
        self.scratch = Scratch(num_rows * self.width, dtype=self.dtype, device=hidden.device)

    def columns(self) -> Iterator[tuple[slice, Tensor]]:
        """Stretches of the vocabulary and their weights in the dtype of the computation."""
        for start in range(0, self.weight.shape[0], self.width):
            columns = slice(start, min(start + self.width, self.weight.shape[0]))
            yield columns, self.weight[columns].to(self.dtype)

    def chunk(self, rows: slice) -> Tensor:
        """Hidden states of ``rows`` in the dtype of the computation."""
        return self.hidden[rows].to(self.dtype)

    def logits(self, chunk: Tensor, weight_tile: Tensor, columns: slice) -> Tensor:
        """Logits of a tile, in scratch buffer 0."""
        tile = self.scratch.shaped(0, torch.Size((chunk.shape[0], weight_tile.shape[0])))
        # Products that write to a given tensor keep its precision under autocast, too.
        torch.mm(chunk, weight_tile.t(), out=tile)
        if self.bias is not None:
            tile.add_(self.bias[columns])
        return tile if self.temperature == 1.0 else tile.div_(self.temperature)


def _add_columns(
    head: _Head,
    gradient: RowGradient,
    columns: slice,
    weight_tile: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Add a stretch of the vocabulary to the gradient of ``hidden``, and fill it in for ``weight`` and ``bias``."""
    grad_hidden, grad_weight, grad_bias = grads
    weight_sum = None
    if grad_weight is not None:
        in_place = grad_weight.dtype == head.dtype
        weight_sum = grad_weight[columns] if in_place else torch.empty_like(weight_tile)
    for rows in row_slices(head.hidden.shape[0], head.chunk_size):
        chunk = head.chunk(rows)
        logits = head.logits(chunk, weight_tile, columns)
        tile = gradient.tile(logits, rows, columns.start, logits, head.scratch)
        if grad_hidden is not None:
            grad_hidden[rows].addmm_(tile, weight_tile)
        if weight_sum is not None:
            # The first product overwrites what an uninitialised sum holds.
            weight_sum.addmm_(tile.t(), chunk, beta=int(rows.start > 0))
        if grad_bias is not None:
            grad_bias[columns] += tile.sum(dim=0)
    if grad_weight is not None and weight_sum is not None and grad_weight.dtype != head.dtype:
        grad_weight[columns] = weight_sum


def _take(x: Any, rows: Tensor | None) -> Any:
    return x if x is None or rows is None else x[rows]
