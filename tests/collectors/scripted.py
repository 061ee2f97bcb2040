"""Prompts, answers and rewards under full control, for tests of the collectors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from dapo_components.collectors import DynamicSamplingCollector, RolloutCollector
from dapo_components.data.loader import PromptLoader
from dapo_components.data.prompts import Prompt
from dapo_components.filters import NonZeroStdFilter
from dapo_components.generation.base import Completion, GenerationRequest, Generator, SamplingParams
from dapo_components.rewards import RewardSet
from tests.helpers import ScriptedGenerator

PAD = 99
Answers = dict[tuple[int, ...], Sequence[Sequence[int]]]
ANSWERS = {"I": (1, 0), "E": (1, 1), "H": (0, 0)}
"""First tokens of a group's two responses: informative, too easy, too hard. 1 is right."""


class PromptList(list[Prompt]):
    """Prompts of two tokens that name their index."""

    fingerprint = "prompts of a test"

    def __init__(self, num_prompts: int) -> None:
        super().__init__(Prompt(i, f"prompt {i}", (100 + i, 7), {"answer": str(i)}) for i in range(num_prompts))
        self.num_dropped: dict[str, int] = {}


class LossyTokenizer:
    """Its text does not encode back to the ids: every id above 50 looks the same."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return " ".join(str(token) if token <= 50 else "?" for token in token_ids)


class SeededGenerator(ScriptedGenerator):
    """Draws the response of a request from its seed alone: right or wrong, and one to three tokens long."""

    def __init__(self) -> None:
        super().__init__({})
        self._queue: list[GenerationRequest] = []

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests += requests
        self._queue += requests

    def step(self) -> list[Completion]:
        done, self._queue = self._queue, []
        return [self._answer(request) for request in done]

    def num_in_flight(self) -> int:
        return len(self._queue)

    def _answer(self, request: GenerationRequest) -> Completion:
        drawn = hashlib.sha256(str(request.seed).encode()).digest()
        tokens = (drawn[0] % 2, *(token % 50 for token in drawn[2 : 2 + drawn[1] % 3]))
        return Completion(
            request_id=request.request_id,
            tokens=tokens,
            log_probs=tuple(-token / 256 for token in tokens),
            versions=(self.version,) * len(tokens),
            finish_reason="stop",
        )


class PatternGenerator(SeededGenerator):
    """Answers prompt ``i`` with the two responses that ``pattern[i]`` stands for, one token longer each."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern

    def _answer(self, request: GenerationRequest) -> Completion:
        sample = request.request_id % 2
        tokens = (ANSWERS[self.pattern[request.prompt_tokens[0] - 100]][sample], *(9,) * sample)
        return Completion(
            request_id=request.request_id,
            tokens=tokens,
            log_probs=(-0.5,) * len(tokens),
            versions=(self.version,) * len(tokens),
            finish_reason="stop",
        )


def first_token_is_one(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    return [float(ids[0] == 1) for ids in completion_ids]


def length_bonus(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    return [0.5 * len(ids) for ids in completion_ids]


def rollouts(generator: Generator, reward: RewardSet | None = None, *, group_size: int = 2) -> RolloutCollector:
    return RolloutCollector(
        generator,
        reward or RewardSet({"right": first_token_is_one}),
        LossyTokenizer(),
        sampling=SamplingParams(max_tokens=4),
        group_size=group_size,
        seed=11,
        pad_id=PAD,
    )


def collector(
    pattern: str,
    *,
    group_filter: Callable[..., Any] | str | None = "default",
    generator: Generator | None = None,
    reward: RewardSet | None = None,
    **options: Any,
) -> DynamicSamplingCollector:
    """Build a collector over prompts whose groups come out as ``pattern`` says, in that order."""
    options.setdefault("max_staleness", 1)
    world = {name: options[name] for name in ("rank", "world_size") if name in options}
    dataset: Any = PromptList(len(pattern))
    loader = PromptLoader(dataset, seed=0, shuffle=False, **world)
    chosen: Any = NonZeroStdFilter() if group_filter == "default" else group_filter
    source = rollouts(generator or PatternGenerator(pattern), reward)
    return DynamicSamplingCollector(source, loader, chosen, **{"max_staleness": 1, **options})


def prompt_ids(batch: Any) -> list[int]:
    return batch["prompt_id"][:, 0].tolist()


def waiting_prompts(source: DynamicSamplingCollector) -> list[int]:
    return [int(batch["prompt_id"][0, 0]) for _, batch in source.state_dict()["waiting"]]
