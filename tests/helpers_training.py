"""Ragged batches and slow references for tests of the training helpers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from dapo_components.data.batch import make_batch
from tests.helpers import TINY_VOCAB

RAGGED = (([6, 1, 4], 3), ([2, 2, 9], 5), ([1, 1, 1], 1))
"""Response lengths and prompt length of three groups."""


def ragged_batch(
    groups: Sequence[tuple[Sequence[int], int]] = RAGGED, *, seed: int = 0, vocab_size: int = TINY_VOCAB
) -> TensorDict:
    """Build a batch of random tokens; ``groups`` holds response lengths and prompt length of each group."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(vocab_size, (length,), generator=generator).tolist()

    prompts = [draw(prompt_length) for _, prompt_length in groups]
    responses = [[draw(length) for length in lengths] for lengths, _ in groups]
    log_probs = [[[-1.0] * len(response) for response in group] for group in responses]
    return make_batch(prompts, responses, log_probs, pad_id=0)


def sequence_log_probs(model: nn.Module, batch: TensorDict, row: tuple[int, int], temperature: float) -> Tensor:
    """Log-probs of one response from the model's own forward pass over prompt and response alone."""
    prompt = batch["prompt_tokens"][row][batch["prompt_mask"][row]]
    response = batch["response_tokens"][row][: int(batch["response_length"][row])]
    output = model(torch.cat([prompt, response])[None])
    logits = (output if isinstance(output, Tensor) else output.logits)[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)[torch.arange(len(response)), response]


def reference_log_probs(model: nn.Module, batch: TensorDict, temperature: float = 1.0) -> Tensor:
    """Log-probs ``[B, G, T]``, one response at a time; 0 where there is no token."""
    result = torch.zeros(batch["response_tokens"].shape, dtype=next(model.parameters()).dtype)
    for index in torch.cartesian_prod(*map(torch.arange, batch.shape)).tolist():
        row = (index[0], index[1])
        values = sequence_log_probs(model, batch, row, temperature)
        result = result.index_put((torch.tensor(row[0]), torch.tensor(row[1]), torch.arange(len(values))), values)
    return result


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients by parameter name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
