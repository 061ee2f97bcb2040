"""Forward passes of a causal LM for sampling: many prompts at once, or one more token for many rows.

Notation: ``N`` rows, ``S`` prompt positions, ``D`` model width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dapo_components.generation.attention import Attention, attention_replaced, check_attention, num_layers
from dapo_components.generation.kv_cache import PromptAttention, SlotCache, TokenAttention
from dapo_components.training.causal_lm import forward_with_head, head_parameters

_HEAD_CHUNK = 1024


class ModelRunner:
    """Runs a model that may be in use elsewhere, and leaves it as it was found.

    No gradients, evaluation mode, our attention: all three only while a pass runs.

    Args:
        model: torchtune decoder or Hugging Face causal LM, on one device.

    Raises:
        ValueError: If the model is of another kind, sharded, or has attention of another kind.
    """

    def __init__(self, model: nn.Module) -> None:
        if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            raise ValueError(
                "model must hold whole parameters, got sharded ones; give the generator an unsharded copy and send it "
                "weights with update_weights"
            )
        check_attention(model)
        weight, _ = head_parameters(model)
        self.model = model
        self.num_layers = num_layers(model)
        self.vocab_size = weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        return head_parameters(self.model)[0].device

    def run_prompts(self, prompts: Sequence[Sequence[int]]) -> tuple[PromptAttention, Tensor]:
        """Run prompts, padded to the longest.

        Args:
            prompts: Ids of each prompt.

        Returns:
            Their keys and values, and the logits after the last token of each, ``[N, V]``.
        """
        lengths = [len(prompt) for prompt in prompts]
        # Padded with a token of the row itself: what comes after the last token must be finite, and no more.
        padded = [[*prompt, *[prompt[-1]] * (max(lengths) - len(prompt))] for prompt in prompts]
        attention = PromptAttention(self.num_layers)
        last = torch.tensor(lengths, device=self.device) - 1
        return attention, self._run(padded, None, attention, last)

    def run_tokens(self, tokens: Sequence[int], positions: Sequence[int], cache: SlotCache, length: int) -> Tensor:
        """Run one token of each slot 0, 1, 2, ... and store its keys and values.

        Args:
            tokens: Last token of each row.
            positions: Its position.
            cache: Earlier keys and values; row ``i`` is slot ``i``.
            length: Cached positions to look at: more than any of ``positions``.

        Returns:
            Logits of the next token, ``[N, V]``.
        """
        position = torch.tensor(positions, device=self.device)
        attention = TokenAttention(cache, position, length)
        return self._run([[token] for token in tokens], position[:, None], attention, torch.zeros_like(position))

    def _run(
        self, tokens: Sequence[Sequence[int]], positions: Tensor | None, attention: Attention, last: Tensor
    ) -> Tensor:
        def head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _logits(hidden[torch.arange(len(last), device=last.device), last], weight, bias)

        with torch.no_grad(), _evaluating(self.model), attention_replaced(self.model, attention):
            return forward_with_head(self.model, torch.tensor(tokens, device=self.device), positions, head=head)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the vocabulary head to ``[N, D]``; float32 out."""
    if weight.device.type != "cpu" or weight.shape[0] <= 8 * _HEAD_CHUNK:
        return nn.functional.linear(hidden, weight, bias).float()
    # A CPU multiplies few rows by a tall matrix a quarter faster in pieces that stay in its cache.
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], _HEAD_CHUNK):
        piece = slice(start, start + _HEAD_CHUNK)
        torch.mm(hidden, weight[piece].t(), out=logits[:, piece])
    return (logits if bias is None else logits + bias).float()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch off training behaviour module by module, so that a part kept in evaluation mode stays in it."""
    training: list[nn.Module] = []
    pending: list[nn.Module | None] = [model]
    # model.modules() takes longer than a layer of a tiny model, and this runs for each token.
    while pending:
        module = pending.pop()
        if module is not None:
            pending.extend(module._modules.values())
            if module.training:
                training.append(module)
    # Past nn.Module.__setattr__, which looks for parameters of that name first: a tenth of a tiny model's step.
    for module in training:
        module.__dict__["training"] = False
    try:
        yield
    finally:
        for module in training:
            module.__dict__["training"] = True
