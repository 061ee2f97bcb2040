"""Tiny models and a generator that answers from a list, for tests of any layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dapo_components.generation.base import Completion, FinishReason, GenerationRequest

TINY_VOCAB = 13
TINY_LENGTH = 64


def tiny_torchtune(
    seed: int = 0, *, vocab_size: int = TINY_VOCAB, tied: bool = True, std: float = 0.4, max_seq_len: int = TINY_LENGTH
) -> Any:
    """Build a 2-layer torchtune decoder, 16 wide, two query heads per key head, with random weights.

    Args:
        seed: Of the weights.
        vocab_size: Number of tokens.
        tied: Whether the head is the embedding.
        std: Of the weights; the larger, the further from uniform are its predictions.
        max_seq_len: Most positions.
    """
    from torchtune.models.llama3_2 import llama3_2

    model = llama3_2(
        vocab_size=vocab_size,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=16,
        max_seq_len=max_seq_len,
        intermediate_dim=32,
        rope_base=10_000,
        scale_factor=1,
        tie_word_embeddings=tied,
    )
    return _randomised(model, seed, std)


def tiny_huggingface(
    seed: int = 0, *, vocab_size: int = TINY_VOCAB, tied: bool = True, std: float = 0.4, max_seq_len: int = TINY_LENGTH
) -> Any:
    """Build the Hugging Face Llama that computes what :func:`tiny_torchtune` with equal arguments computes."""
    from torchtune.models.convert_weights import tune_to_hf
    from transformers import LlamaConfig, LlamaForCausalLM

    source = tiny_torchtune(seed, vocab_size=vocab_size, tied=tied, std=std, max_seq_len=max_seq_len)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_seq_len,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    weights = tune_to_hf(source.state_dict(), num_heads=4, num_kv_heads=2, dim=16)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model.eval()


TINY_MODELS = {"torchtune": tiny_torchtune, "huggingface": tiny_huggingface}


def plain_logits(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """Logits ``[S, V]`` of one sequence by the model's own full forward pass."""
    with torch.no_grad():
        output: Any = model(torch.tensor([list(tokens)]))
    return (output if isinstance(output, Tensor) else output.logits)[0]


def _randomised(model: nn.Module, seed: int, std: float) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std, generator=generator)
    return model.eval()


class ScriptedGenerator:
    """Answers from lists; implements the ``Generator`` protocol with exact control over what finishes when.

    The ``n``-th request with some prompt gets the ``n``-th answer of that prompt's list. One step is one tick of a
    clock: a request finishes in the step in which its latency has passed.

    Args:
        answers: Response tokens for each prompt, ``{prompt_tokens: [response, ...]}``.
        latency: Steps a request takes: a number for all, or ``{request_id: steps}`` (1 where absent).
        log_prob: Reported for every token.
        finish: Finish reason for all, or ``{request_id: reason}`` (``stop`` where absent).
    """

    def __init__(
        self,
        answers: dict[tuple[int, ...], Sequence[Sequence[int]]],
        *,
        latency: int | dict[int, int] = 1,
        log_prob: float = -1.0,
        finish: FinishReason | dict[int, FinishReason] = "stop",
    ) -> None:
        self.version = 0
        self.requests: list[GenerationRequest] = []
        """Everything submitted so far, in order."""
        self.weight_updates: list[tuple[dict[str, Tensor], int]] = []
        self.closed = False
        self._answers = {prompt: deque(map(tuple, responses)) for prompt, responses in answers.items()}
        self._latency = latency
        self._log_prob = log_prob
        self._finish: FinishReason | dict[int, FinishReason] = finish
        self._running: dict[int, _Scripted] = {}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.request_id in self._running:
                raise ValueError(f"request_id {request.request_id} is in flight already")
            waiting = self._answers.get(request.prompt_tokens)
            if not waiting:
                raise AssertionError(f"no answer left for prompt {request.prompt_tokens}")
            steps = self._latency if isinstance(self._latency, int) else self._latency.get(request.request_id, 1)
            self._running[request.request_id] = _Scripted(request, waiting.popleft(), steps)
            self.requests.append(request)

    def step(self) -> list[Completion]:
        for running in self._running.values():
            running.steps_left -= 1
        done = [running for running in self._running.values() if running.steps_left <= 0]
        return [self._complete(running, self._reason(running.request.request_id)) for running in done]

    def abort(self, request_ids: Sequence[int]) -> list[Completion]:
        wanted = [self._running[request_id] for request_id in request_ids if request_id in self._running]
        return [self._complete(running, "abort") for running in wanted]

    def num_in_flight(self) -> int:
        return len(self._running)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.weight_updates.append((dict(named_tensors), version))
        self.version = version

    def close(self) -> None:
        self._running.clear()
        self.closed = True

    def _reason(self, request_id: int) -> FinishReason:
        return self._finish.get(request_id, "stop") if isinstance(self._finish, dict) else self._finish

    def _complete(self, running: _Scripted, reason: FinishReason) -> Completion:
        del self._running[running.request.request_id]
        tokens = running.answer[len(running.request.prefix_tokens) :]
        if reason == "abort":
            # One token a step, as far as it got.
            tokens = tokens[: running.steps_total - running.steps_left]
        return Completion(
            request_id=running.request.request_id,
            tokens=tokens,
            log_probs=(self._log_prob,) * len(tokens),
            versions=(self.version,) * len(tokens),
            finish_reason=reason,
            error="scripted error" if reason == "error" else "",
        )


class _Scripted:
    def __init__(self, request: GenerationRequest, answer: tuple[int, ...], steps: int) -> None:
        self.request = request
        self.answer = answer
        self.steps_total = self.steps_left = steps
