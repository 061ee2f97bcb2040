"""The autograd function behind :func:`dapo_components.functional.log_probs.token_log_probs`.

Shapes: ``N`` tokens to score, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dapo_components.functional.softmax_tiles import (
    RowGradient,
    Rows,
    Scratch,
    SoftmaxStatistics,
    active_rows,
    compute_dtype,
    row_chunks,
    tile_elements,
)


class LogitsLogProbs(torch.autograd.Function):
    """Log-probs and entropies of ``softmax(logits / temperature)``, some rows at a time.

    Without the entropy each chunk is one call of torch's own fused softmax, which keeps a row in the cache by itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        selected: Tensor | None,
        temperature: float,
        chunk_size: int | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Score ``tokens`` [N], given ``logits`` [N, V], in the rows ``selected``; the others give 0."""
        reader = _LogitsReader(logits, temperature, chunk_size, num_buffers=1 + with_entropy)
        statistics = SoftmaxStatistics(tokens, dtype=reader.dtype, with_entropy=with_entropy)
        log_prob, entropy = torch.zeros_like(statistics.peak), None
        for rows in row_chunks(logits.shape[0], selected, reader.chunk_size):
            tile = reader.read(rows)
            if statistics.weighted is not None:
                statistics.absorb(tile, rows, 0, reader.scratch)
            else:
                log_probs = torch.log_softmax(tile, dim=1, out=reader.scratch.shaped(1, tile.shape))
                log_prob[rows] = log_probs.gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
        if statistics.weighted is not None:
            log_prob, entropy = _only(statistics.log_prob(), selected), _only(statistics.entropy(), selected)
        ctx.save_for_backward(logits, selected, tokens, statistics.peak, statistics.total, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradient for ``logits``, in their dtype; the one tensor of their size."""
        if all(grad is None for grad in grad_outputs):
            return (None,) * 6
        logits, selected, tokens, peak, total, entropy = ctx.saved_tensors
        active = active_rows(grad_outputs, selected)
        at_token, for_entropy = (None if grad is None else grad / ctx.temperature for grad in grad_outputs)
        gradient = None
        if for_entropy is not None:
            gradient = RowGradient(tokens, peak, total, entropy, at_token, for_entropy)
        reader = _LogitsReader(logits, ctx.temperature, ctx.chunk_size, num_buffers=1 if gradient is None else 2)
        grad_logits = torch.empty_like(logits) if active is None else torch.zeros_like(logits)
        in_place = active is None and logits.dtype == reader.dtype
        for rows in row_chunks(logits.shape[0], active, reader.chunk_size):
            tile = reader.read(rows)
            out = grad_logits[rows] if in_place else reader.scratch.shaped(2, tile.shape)
            if gradient is not None:
                gradient.tile(tile, rows, 0, out, reader.scratch)
            elif at_token is not None:
                _softmax_gradient(tile, tokens[rows].unsqueeze(1), at_token[rows].unsqueeze(1), out)
            if not in_place:
                grad_logits[rows] = out.to(logits.dtype)
        return grad_logits, None, None, None, None, None


def _softmax_gradient(logits: Tensor, tokens: Tensor, grad: Tensor, out: Tensor) -> None:
    """Write ``grad * (1[k = token] - p_k)`` to ``out``; tokens and gradients are columns."""
    torch.softmax(logits, dim=1, out=out).mul_(-grad).scatter_add_(1, tokens, grad)


def _only(values: Any, selected: Tensor | None) -> Any:
    """0 in the rows that are not selected."""
    if selected is None:
        return values
    return torch.zeros_like(values).index_copy_(0, selected, values[selected])


class _LogitsReader:
    """Reads rows of logits in the dtype of the computation, divided by the temperature.

    Args:
        logits: ``[N, V]``.
        temperature: Divides the logits.
        chunk_size: Rows at a time, or None for as many as make a tile.
        num_buffers: Tiles that are in use at a time.
    """

    def __init__(self, logits: Tensor, temperature: float, chunk_size: int | None, *, num_buffers: int) -> None:
        self.logits, self.temperature = logits, temperature
        num_rows, width = logits.shape
        # Each thread of a CPU should have some rows of its own.
        fitting = max(4 * torch.get_num_threads(), tile_elements(logits.device) // max(1, num_buffers * width))
        self.chunk_size = max(1, min(num_rows, chunk_size or fitting))
        self.dtype = compute_dtype(logits)
        self.scratch = Scratch(self.chunk_size * width, dtype=self.dtype, device=logits.device)

    def read(self, rows: Rows) -> Tensor:
        """The rows' logits: a view where nothing has to be computed, otherwise in scratch buffer 0."""
        tile = self.logits[rows]
        if tile.dtype == self.dtype and self.temperature == 1.0:
            return tile
        copy = self.scratch.shaped(0, tile.shape).copy_(tile)
        return copy if self.temperature == 1.0 else copy.div_(self.temperature)
