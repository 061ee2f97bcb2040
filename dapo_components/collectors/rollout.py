"""Prompts in, scored ``[B, G]`` batches out: generation and rewards, nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from tensordict import TensorDict

from dapo_components.data.batch import make_batch
from dapo_components.data.component import read_key
from dapo_components.data.prompts import Prompt
from dapo_components.generation.base import Completion, GenerationRequest, Generator, SamplingParams
from dapo_components.rewards import RewardScores, RewardSet


class TextDecoder(Protocol):
    """The one thing a collector needs from a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> Any:
        """Turn ids into text."""
        ...


class GenerationFailed(RuntimeError):
    """The engine reported an error instead of a response."""


class RewardFailed(RuntimeError):
    """A reward function raised, or returned something that is not a score; the message names it."""


@dataclass(frozen=True)
class Rollouts:
    """Scored responses.

    Args:
        batch: ``[B, G]`` batch with masks, log-probs, ``accuracy``, ``reward`` and the components.
        records: The same as text for a log: ``B`` lists of ``G`` dictionaries.
        statuses: For each reward component, how often each status occurred.
    """

    batch: TensorDict
    records: list[list[dict[str, Any]]]
    statuses: dict[str, dict[str, int]]


@final
class RolloutCollector:
    """Sample ``G`` responses to each prompt and score them.

    Every response is drawn with its own seed, hashed from the run's seed and the ids of group, prompt and sample, so
    it depends neither on the order of requests nor on what else is in flight.

    Args:
        generator: Engine.
        reward: Scores responses; called once for all responses of a call.
        tokenizer: Decodes responses for the rewards.
        sampling: How to sample.
        group_size: Responses per prompt, ``G``.
        seed: Seed of the run.
        pad_id: Id written to padding.

    Raises:
        ValueError: If ``group_size`` is not positive.

    Example:
        >>> from types import SimpleNamespace
        >>> from torchtune.models.llama3_2 import llama3_2
        >>> from dapo_components.generation import CausalLMGenerator
        >>> _ = torch.manual_seed(0)
        >>> model = llama3_2(
        ...     vocab_size=9, num_layers=1, num_heads=1, num_kv_heads=1, embed_dim=4, max_seq_len=16, intermediate_dim=4
        ... )
        >>> def is_even(completion_ids, **columns):
        ...     return [1.0 - ids[0] % 2 for ids in completion_ids]
        >>> collector = RolloutCollector(
        ...     CausalLMGenerator(model),
        ...     RewardSet({"even": is_even}),
        ...     SimpleNamespace(decode=lambda ids, **options: " ".join(map(str, ids))),
        ...     sampling=SamplingParams(max_tokens=5),
        ...     group_size=3,
        ...     seed=0,
        ... )
        >>> rollouts = collector.collect([Prompt(0, "4 2", (4, 2), {}), Prompt(1, "7", (7,), {})], group_ids=[0, 1])
        >>> rollouts.batch.shape, rollouts.batch["response_tokens"].shape, rollouts.records[1][2]["prompt"]
        (torch.Size([2, 3]), torch.Size([2, 3, 5]), '7')
    """

    def __init__(
        self,
        generator: Generator,
        reward: RewardSet,
        tokenizer: TextDecoder,
        *,
        sampling: SamplingParams,
        group_size: int,
        seed: int,
        pad_id: int = 0,
    ) -> None:
        if group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {group_size}")
        self.generator = generator
        self.reward = reward
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.group_size = group_size
        self.seed = seed
        self.pad_id = pad_id

    def collect(self, prompts: Sequence[Prompt], group_ids: Sequence[int]) -> Rollouts:
        """Generate and score one group per prompt.

        Args:
            prompts: ``B`` prompts, at least one.
            group_ids: ``B`` ids, unique within the run.

        Returns:
            The batch and its text, both in the order of ``prompts``.

        Raises:
            GenerationFailed: If the engine reports an error for a response.
            RewardFailed: If a reward function fails.
        """
        completions = self._generate(prompts, group_ids)
        size = (len(prompts), self.group_size)
        groups = [completions[start : start + size[1]] for start in range(0, len(completions), size[1])]
        batch = make_batch(
            [prompt.tokens for prompt in prompts],
            [[completion.tokens for completion in group] for group in groups],
            [[completion.log_probs for completion in group] for group in groups],
            pad_id=self.pad_id,
        )
        truncated = [[completion.finish_reason == "length" for completion in group] for group in groups]
        version = [[min(c.versions, default=self.generator.version) for c in group] for group in groups]
        batch["truncated"] = torch.tensor(truncated)
        batch["policy_version"] = torch.tensor(version)
        batch["prompt_id"] = torch.tensor([prompt.prompt_id for prompt in prompts])[:, None].repeat(1, size[1])
        batch["group_id"] = torch.tensor(list(group_ids))[:, None].repeat(1, size[1])
        batch["sample_id"] = torch.arange(size[1]).repeat(size[0], 1)
        texts = [self.tokenizer.decode(list(c.tokens), skip_special_tokens=True) for c in completions]
        scores = self._score(batch, prompts, completions, texts)
        return Rollouts(batch, self._records(batch, scores, prompts, texts), scores.statuses)

    def _generate(self, prompts: Sequence[Prompt], group_ids: Sequence[int]) -> list[Completion]:
        requests = [
            GenerationRequest(
                request_id=number * self.group_size + sample,
                prompt_tokens=prompt.tokens,
                sampling=self.sampling,
                seed=request_seed(self.seed, group_id, prompt.prompt_id, sample),
            )
            for number, (prompt, group_id) in enumerate(zip(prompts, group_ids, strict=True))
            for sample in range(self.group_size)
        ]
        self.generator.submit(requests)
        finished: list[Completion] = []
        try:
            while self.generator.num_in_flight():
                finished += self.generator.step()
        except BaseException:
            self.generator.abort([request.request_id for request in requests])  # the ids are free for the next call
            raise
        finished.sort(key=lambda completion: completion.request_id)
        failed = [completion for completion in finished if completion.finish_reason == "error"]
        if failed or len(finished) != len(requests):
            said = next((f" (the first says: {completion.error})" for completion in failed if completion.error), "")
            raise GenerationFailed(
                f"{len(failed)} of {len(requests)} responses failed in the engine{said} and "
                f"{len(requests) - len(finished)} are missing; non-finite weights are the usual cause: look at "
                "grad_norm and loss in metrics.jsonl and resume from an earlier checkpoint with a lower learning rate"
            )
        return finished

    def _score(
        self, batch: TensorDict, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: list[str]
    ) -> RewardScores:
        repeated = [prompt for prompt in prompts for _ in range(self.group_size)]
        columns = {name: [prompt.columns[name] for prompt in repeated] for name in prompts[0].columns}
        # An answer at the very end of a response that was cut off may have lost digits.
        columns["truncated"] = [completion.finish_reason == "length" for completion in completions]
        try:
            scores = self.reward(
                prompts=[prompt.text for prompt in repeated],
                completions=texts,
                completion_ids=[list(completion.tokens) for completion in completions],
                **columns,
            )
        except ValueError as error:
            raise RewardFailed(str(error)) from error
        batch["accuracy"] = scores.accuracy.view(batch.shape)
        batch["reward"] = scores.reward.view(batch.shape)
        for name, value in scores.components.items():
            batch["rewards", name] = value.view(batch.shape)
        return scores

    def _records(
        self, batch: TensorDict, scores: RewardScores, prompts: Sequence[Prompt], texts: list[str]
    ) -> list[list[dict[str, Any]]]:
        names = ("group_id", "sample_id", "policy_version", "response_length", "truncated", "accuracy", "reward")
        columns = {name: read_key(batch, name, reader="RolloutCollector").flatten().tolist() for name in names}
        components = {name: value.tolist() for name, value in scores.components.items()}
        rows = [
            {
                "prompt_id": prompts[number // self.group_size].prompt_id,
                **{name: values[number] for name, values in columns.items()},
                "rewards": {name: values[number] for name, values in components.items()},
                "prompt": prompts[number // self.group_size].text,
                "response": text,
                "answer": prompts[number // self.group_size].columns.get("answer"),
            }
            for number, text in enumerate(texts)
        ]
        return [rows[start : start + self.group_size] for start in range(0, len(rows), self.group_size)]


def request_seed(seed: int, group_id: int, prompt_id: int, sample_id: int) -> int:
    """Derive the seed of one response; unlike a sum it does not collide for neighbouring ids.

    Example:
        >>> request_seed(0, 1, 2, 3) == request_seed(0, 1, 2, 3), request_seed(0, 1, 2, 3) == request_seed(0, 1, 3, 2)
        (True, False)
    """
    text = f"{seed}/{group_id}/{prompt_id}/{sample_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
