"""Build, join and pad ``[B, G]`` batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from dapo_components.data.keys import BATCH_KEYS

_SIDES = {"P": "left", "T": "right"}
_TOKEN_KEYS = {
    name: side for name, spec in BATCH_KEYS.items() for letter, side in _SIDES.items() if f"{letter}]" in spec.shape
}
"""Keys with a token dimension, and the side on which they are padded."""


def make_batch(
    prompt_tokens: Sequence[Sequence[int]],
    response_tokens: Sequence[Sequence[Sequence[int]]],
    rollout_log_prob: Sequence[Sequence[Sequence[float]]],
    *,
    pad_id: int,
) -> TensorDict:
    """Lay out token ids of ``B`` groups of ``G`` responses as padded tensors.

    Args:
        prompt_tokens: ``B`` prompts.
        response_tokens: ``B`` groups of ``G`` responses.
        rollout_log_prob: As many log-probs as response tokens.
        pad_id: Id written to padding.

    Returns:
        Batch ``[B, G]`` with prompts left-padded, responses right-padded and all masks.

    Raises:
        ValueError: If there is no group, group sizes differ, or a response has more or fewer log-probs than tokens.

    Example:
        >>> batch = make_batch([[5, 6]], [[[7], [8, 9]]], [[[-0.1], [-0.2, -0.3]]], pad_id=0)
        >>> batch.batch_size, batch["response_tokens"].tolist(), batch["response_length"].tolist()
        (torch.Size([1, 2]), [[[7, 0], [8, 9]]], [[1, 2]])
    """
    size = (len(prompt_tokens), _group_size(prompt_tokens, response_tokens))
    responses = [response for group in response_tokens for response in group]
    log_probs = [values for group in rollout_log_prob for values in group]
    for number, (tokens, values) in enumerate(zip(responses, log_probs, strict=True)):
        if len(tokens) != len(values):
            raise ValueError(f"response {number} has {len(tokens)} tokens but {len(values)} log-probs")
    response_mask, flat = _right_padded(responses)
    tokens = torch.full(response_mask.shape, pad_id)
    tokens[response_mask] = torch.tensor(flat, dtype=torch.long)
    log_prob = torch.zeros(response_mask.shape)
    log_prob[response_mask] = torch.tensor([value for values in log_probs for value in values], dtype=torch.float32)
    prompt_mask, flat = _right_padded(prompt_tokens)
    prompt_mask = prompt_mask.flip(-1)
    prompts = torch.full(prompt_mask.shape, pad_id)
    prompts[prompt_mask] = torch.tensor(flat, dtype=torch.long)
    mask = response_mask.view(*size, -1)
    return TensorDict(
        {
            "prompt_tokens": prompts[:, None].expand(*size, -1).contiguous(),
            "prompt_mask": prompt_mask[:, None].expand(*size, -1).contiguous(),
            "response_tokens": tokens.view(*size, -1),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "rollout_log_prob": log_prob.view(*size, -1),
            "response_length": mask.sum(-1),
        },
        batch_size=size,
    )


def concatenate(batches: Sequence[TensorDictBase], *, pad_id: int) -> TensorDict:
    """Join batches along ``B``, padding prompts on the left and responses on the right to common widths.

    Args:
        batches: Batches with the same keys and group size.
        pad_id: Id written to new padding of token ids; other keys get 0.

    Raises:
        ValueError: If there is none, or group sizes differ.

    Example:
        >>> one = make_batch([[5]], [[[7]]], [[[-0.1]]], pad_id=0)
        >>> two = make_batch([[5, 6]], [[[8, 9]]], [[[-0.2, -0.3]]], pad_id=0)
        >>> concatenate([one, two], pad_id=0)["response_tokens"].tolist()
        [[[7, 0]], [[8, 9]]]
    """
    if not batches:
        raise ValueError("concatenate needs at least one batch")
    sizes = {batch.shape[1] for batch in batches}
    if len(sizes) > 1:
        raise ValueError(f"batches of different group sizes {sorted(sizes)} cannot be joined")
    # The advantage may be one number per response or one per token.
    keys = [key for key in _TOKEN_KEYS if key in batches[0].keys() and batches[0][key].ndim > 2]
    widths = {key: max(batch[key].shape[-1] for batch in batches) for key in keys}
    padded = [
        batch.clone(recurse=False).update(
            {key: _pad(batch[key], width, _TOKEN_KEYS[key], pad_id) for key, width in widths.items()}
        )
        for batch in batches
    ]
    return torch.cat(padded)  # pyright: ignore[reportCallIssue, reportArgumentType, reportReturnType]


def _group_size(prompt_tokens: Sequence[object], response_tokens: Sequence[Sequence[object]]) -> int:
    if not response_tokens or len(prompt_tokens) != len(response_tokens):
        raise ValueError(
            f"a batch needs one group of responses per prompt and at least one, got {len(prompt_tokens)} prompts and "
            f"{len(response_tokens)} groups"
        )
    sizes = {len(group) for group in response_tokens}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"all groups need the same number of responses, at least one, got {sorted(sizes)}")
    return sizes.pop()


def _right_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    length = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(length.max())) < length[:, None]
    return mask, [value for row in rows for value in row]


def _pad(value: Tensor, width: int, side: str, pad_id: int) -> Tensor:
    missing = width - value.shape[-1]
    if not missing:
        return value
    fill = pad_id if value.dtype == torch.long else 0
    return torch.nn.functional.pad(value, (missing, 0) if side == "left" else (0, missing), value=fill)
