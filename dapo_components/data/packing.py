"""Micro-batches under a token budget, as pure index plans.

``N`` responses are packed into rows ``[prompt | response | response | ...]`` of one group, so that the backbone reads a
prompt once instead of ``G`` times. A mask keeps the responses of a row apart, so packing changes no number. Only the
positions that predict a response token reach the vocabulary head.

Notation: ``N`` responses, ``P`` prompt positions, ``T`` response positions, ``R`` rows of a micro-batch with ``n``
responses, ``S`` tokens of its longest row, ``M`` predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

Row = tuple[int, ...]
"""Responses (indices in ``0..N-1``) that share one copy of their prompt."""


@dataclass(frozen=True)
class PackedTokens:
    """What the model reads for one micro-batch, and where its predictions belong.

    Args:
        tokens: ``[R, S]`` input ids, right-padded.
        positions: ``[R, S]`` position of each token within its own sequence.
        attention_mask: ``[R, S, S]`` bool, True where a query may attend; None when plain causal attention is right.
        source: ``[M]`` flat index into ``R * S`` of the position that predicts each token.
        target_tokens: ``[M]`` the predicted ids.
        responses: ``[n]`` the responses in this micro-batch, indices in ``0..N-1``.
        target: ``[M]`` flat index into ``n * T`` where each prediction belongs.
    """

    tokens: Tensor
    positions: Tensor
    attention_mask: Tensor | None
    source: Tensor
    target_tokens: Tensor
    responses: Tensor
    target: Tensor

    def scatter(self, values: Tensor, num_positions: int) -> Tensor:
        """Put ``[M]`` predictions at their places in ``[n, num_positions]``; the rest is 0."""
        flat = values.new_zeros(self.responses.shape[0] * num_positions)
        return flat.index_put((self.target,), values).view(-1, num_positions)

    def to(self, device: torch.device | str) -> PackedTokens:
        """Return the same tensors on ``device``."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if value is not None})


def plan_micro_batches(
    prompt_length: Sequence[int],
    response_length: Sequence[int],
    group: Sequence[int],
    *,
    max_tokens: int,
    max_shared_length: int = 512,
) -> list[list[Row]]:
    """Distribute responses over micro-batches of at most ``max_tokens`` padded tokens.

    Responses of a group share a row while the row stays within ``max_shared_length``: attention over a shared row is
    quadratic in its length, so long responses are better off alone. Rows of similar length meet in a micro-batch.
    The last token of a response predicts nothing and is not fed to the model.

    Args:
        prompt_length: ``[N]`` prompt lengths in tokens, at least 1.
        response_length: ``[N]`` response lengths in tokens; a response of 0 tokens is left out.
        group: ``[N]`` equal for responses with the same prompt.
        max_tokens: Budget of a micro-batch, rows times longest row.
        max_shared_length: Longest row that holds more than one response; ``max_tokens`` bounds it too.

    Returns:
        Micro-batches of rows; every response with a token is in exactly one row.

    Raises:
        ValueError: If a single response does not fit the budget, or a prompt is empty.

    Example:
        >>> plan_micro_batches([3, 3, 2], [2, 4, 1], [0, 0, 1], max_tokens=16)
        [[(0, 1), (2,)]]
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
    members: dict[int, list[int]] = {}
    for index, key in enumerate(group):
        if response_length[index] > 0:
            members.setdefault(key, []).append(index)
    rows: list[tuple[int, Row]] = []
    for indices in members.values():
        rows += _share_prompt(indices, prompt_length, response_length, min(max_shared_length, max_tokens))
    longest = max((length for length, _ in rows), default=0)
    if longest > max_tokens:
        raise ValueError(
            f"a prompt with its response feeds {longest} tokens to the model, more than max_tokens={max_tokens}; raise "
            "the token budget of a micro-batch to at least max_prompt_length + max_response_length"
        )
    rows.sort(key=lambda row: (-row[0], row[1]))
    micro_batches: list[list[Row]] = []
    width = 0
    for length, row in rows:
        if not micro_batches or (len(micro_batches[-1]) + 1) * width > max_tokens:
            micro_batches.append([])
            width = length
        micro_batches[-1].append(row)
    return micro_batches


def pack_micro_batch(
    rows: Sequence[Row],
    prompt_tokens: Tensor,
    prompt_mask: Tensor,
    response_tokens: Tensor,
    response_length: Sequence[int],
    mask: Tensor,
    *,
    pad_id: int = 0,
) -> PackedTokens:
    """Lay out one micro-batch of a plan.

    Args:
        rows: One micro-batch of :func:`plan_micro_batches`.
        prompt_tokens: ``[N, P]`` left-padded ids, on the CPU like the other tensors.
        prompt_mask: ``[N, P]`` bool.
        response_tokens: ``[N, T]`` ids, responses start at column 0.
        response_length: ``[N]`` tokens to read of each response.
        mask: ``[N, T]`` bool, the positions whose prediction is wanted.
        pad_id: Id written to padding.

    Returns:
        The packed inputs, on the CPU.

    Example:
        >>> prompt, response = torch.tensor([[5, 6], [5, 6]]), torch.tensor([[7, 8], [9, 0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> packed = pack_micro_batch([(0, 1)], prompt, torch.ones(2, 2, dtype=torch.bool), response, [2, 1], mask)
        >>> packed.tokens.tolist(), packed.source.tolist(), packed.target_tokens.tolist()
        ([[5, 6, 7]], [1, 2, 1], [7, 8, 9])
        >>> packed.scatter(torch.tensor([-0.1, -0.2, -0.3]), 2)
        tensor([[-0.1000, -0.2000],
                [-0.3000,  0.0000]])
    """
    width = response_tokens.shape[-1]
    responses = [index for row in rows for index in row]
    laid_out = [
        _lay_out(prompt_tokens[row[0]][prompt_mask[row[0]]], [response_tokens[i, : response_length[i]] for i in row])
        for row in rows
    ]
    longest = max(row.tokens.shape[0] for row in laid_out)
    source = torch.cat([row.predicts + number * longest for number, row in enumerate(laid_out)])
    target = torch.cat(
        [torch.arange(response_length[index]) + number * width for number, index in enumerate(responses)]
    )
    wanted = mask[responses].flatten()[target]
    source, target = source[wanted], target[wanted]
    shared = any(len(row) > 1 for row in rows)
    return PackedTokens(
        tokens=_pad([row.tokens for row in laid_out], longest, pad_id),
        positions=_pad([row.positions for row in laid_out], longest, 0),
        attention_mask=_segment_mask(_pad([row.segments for row in laid_out], longest, -1)) if shared else None,
        source=source,
        target_tokens=response_tokens[responses].flatten()[target],
        responses=torch.tensor(responses),
        target=target,
    )


def _share_prompt(
    indices: list[int], prompt_length: Sequence[int], response_length: Sequence[int], max_shared_length: int
) -> list[tuple[int, Row]]:
    """Fill one row after the other with the responses of a group, in order; returns (row length, responses)."""
    rows: list[tuple[int, Row]] = []
    length, row = 0, []
    for index in indices:
        if prompt_length[index] < 1:
            raise ValueError(f"response {index} has an empty prompt; a prompt needs at least one token")
        added = response_length[index] - 1
        if row and length + added <= max_shared_length:
            row.append(index)
            length += added
            continue
        if row:
            rows.append((length, tuple(row)))
        length, row = prompt_length[index] + added, [index]
    rows.append((length, tuple(row)))
    return rows


class _LaidOutRow(NamedTuple):
    """One row before padding; ``predicts`` holds the position that predicts each response token, in order."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    predicts: Tensor


def _lay_out(prompt: Tensor, responses: Sequence[Tensor]) -> _LaidOutRow:
    """Put a prompt (segment 0) and its responses (segments 1, 2, ...) without their last tokens behind each other."""
    num_prompt = prompt.shape[0]
    tokens, positions, segments = [prompt], [torch.arange(num_prompt)], [torch.zeros(num_prompt, dtype=torch.long)]
    offset, predicts = num_prompt, []
    for segment, response in enumerate(responses, start=1):
        steps = torch.arange(response.shape[0])
        # The first response token is predicted by the last prompt token, which all responses of the row share.
        predicts.append(torch.where(steps == 0, num_prompt - 1, offset + steps - 1))
        tokens.append(response[:-1])
        positions.append(num_prompt + steps[:-1])
        segments.append(torch.full_like(steps[:-1], segment))
        offset += response.shape[0] - 1
    return _LaidOutRow(*map(torch.cat, (tokens, positions, segments, predicts)))


def _pad(rows: list[Tensor], width: int, value: int) -> Tensor:
    padded = torch.full((len(rows), width), value, dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        padded[number, : row.shape[0]] = row
    return padded


def _segment_mask(segment: Tensor) -> Tensor:
    """Causal, and a response sees only the prompt (segment 0) and itself; padding (-1) sees itself."""
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool).tril()
    return ((key == 0) | (key == query)) & causal
