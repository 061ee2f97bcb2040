"""What goes into the engine, what comes out of it, and that nothing is mixed up in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dapo_components.collectors import GenerationFailed, RewardFailed, RolloutCollector, Rollouts, request_seed
from dapo_components.data.prompts import Prompt
from dapo_components.generation.base import Completion, SamplingParams
from dapo_components.rewards import RewardSet
from tests.collectors.scripted import (
    PAD,
    Answers,
    LossyTokenizer,
    PromptList,
    SeededGenerator,
    first_token_is_one,
    rollouts,
)
from tests.helpers import ScriptedGenerator

TWO = PromptList(2)
ANSWERS: Answers = {
    TWO[0].tokens: [(1, 60), (0,), (1, 70, 80)],
    TWO[1].tokens: [(0, 51), (0, 52), (1,)],
}


@pytest.fixture
def collected() -> Rollouts:
    return rollouts(ScriptedGenerator(ANSWERS), group_size=3).collect(TWO, [40, 41])


class TestBatch:
    def test_ids_and_rewards_are_in_the_order_of_the_prompts(self, collected):
        batch = collected.batch
        assert batch.batch_size == (2, 3)
        assert batch["prompt_tokens"][:, 0].tolist() == [[100, 7], [101, 7]]
        assert batch["prompt_id"].tolist() == [[0, 0, 0], [1, 1, 1]]
        assert batch["group_id"].tolist() == [[40, 40, 40], [41, 41, 41]]
        assert batch["sample_id"].tolist() == [[0, 1, 2], [0, 1, 2]]
        assert batch["response_length"].tolist() == [[2, 1, 3], [2, 2, 1]]
        assert batch["accuracy"].tolist() == [[1, 0, 1], [0, 0, 1]]
        assert batch["reward"].tolist() == [[1, 0, 1], [0, 0, 1]]
        assert batch["rewards", "right"].tolist() == [[1, 0, 1], [0, 0, 1]]
        assert batch["rollout_log_prob"][0, 1].tolist() == [-1, 0, 0]

    def test_ids_come_out_as_they_were_sampled(self, collected):
        """The tokenizer cannot encode its own text back, and the padding id is not a token of a response."""
        assert collected.batch["response_tokens"].tolist() == [
            [[1, 60, PAD], [0, PAD, PAD], [1, 70, 80]],
            [[0, 51, PAD], [0, 52, PAD], [1, PAD, PAD]],
        ]

    def test_a_thousand_random_ids_survive(self):
        generator = torch.Generator().manual_seed(0)
        answer = tuple(torch.randint(1000, (1000,), generator=generator).tolist())
        prompt = Prompt(0, "p", (5,), {})
        batch = rollouts(ScriptedGenerator({(5,): [answer]}), group_size=1).collect([prompt], [0]).batch
        assert tuple(batch["response_tokens"][0, 0].tolist()) == answer

    @pytest.mark.parametrize("latency", [{0: 5, 1: 3, 2: 9, 3: 1, 4: 4, 5: 2}, {0: 1, 5: 9}, 2])
    def test_the_order_in_which_responses_finish_does_not_matter(self, collected, latency):
        other = rollouts(ScriptedGenerator(ANSWERS, latency=latency), group_size=3).collect(TWO, [40, 41])
        assert other.records == collected.records
        assert torch.equal(other.batch["response_tokens"], collected.batch["response_tokens"])

    def test_truncated_is_the_finish_reason_not_the_length(self):
        answers: Answers = {TWO[0].tokens: [(1, 2, 3, 4), (1, 2, 3, 4), (1,)], TWO[1].tokens: [(1,)] * 3}
        generator = ScriptedGenerator(answers, finish={0: "stop", 1: "length", 2: "length"})
        batch = rollouts(generator, group_size=3).collect(TWO, [0, 1]).batch
        assert batch["truncated"].tolist() == [[False, True, True], [False] * 3]

    def test_the_policy_version_is_the_oldest_that_wrote_a_token(self):
        class Mixed(ScriptedGenerator):
            def step(self) -> list[Completion]:
                done = super().step()
                return [
                    Completion(**{**vars(c), "versions": tuple(range(7, 7 + len(c.tokens)))}) if c.request_id else c
                    for c in done
                ]

        generator = Mixed(ANSWERS)
        generator.version = 9
        batch = rollouts(generator, group_size=3).collect(TWO, [0, 1]).batch
        assert batch["policy_version"].tolist() == [[9, 7, 7], [7, 7, 7]]

    def test_dtypes_are_those_of_the_key_table(self, collected):
        from dapo_components.data.keys import BATCH_KEYS

        batch = collected.batch
        expected = {key: BATCH_KEYS[key].dtype for key in batch.keys() if key != "rewards"}
        assert {key: batch[key].dtype for key in expected} == expected
        assert batch["rewards", "right"].dtype == torch.float32


class TestRequests:
    def test_seeds_of_a_batch_are_unique_and_hashed(self):
        generator = SeededGenerator()
        prompts = PromptList(16)
        rollouts(generator, group_size=16).collect(prompts, range(16))
        seeds = [request.seed for request in generator.requests]
        assert len(set(seeds)) == 256
        assert seeds[:2] == [request_seed(11, 0, 0, 0), request_seed(11, 0, 0, 1)]
        assert seeds[-1] == request_seed(11, 15, 15, 15)
        assert all(0 <= seed < 2**63 for seed in seeds)

    def test_neighbouring_ids_do_not_collide(self):
        """A sum of ids, or ids written without a separator, would."""
        ids = [
            (seed, group, prompt, sample)
            for seed in (0, 1)
            for group in range(12)
            for prompt in (1, 11)
            for sample in range(12)
        ]
        assert len({request_seed(*each) for each in ids}) == len(ids)
        assert request_seed(1, 11, 1, 1) != request_seed(11, 1, 1, 1)

    def test_a_response_does_not_depend_on_its_neighbours(self):
        prompts = PromptList(3)
        alone = rollouts(SeededGenerator()).collect(prompts[2:], [7]).batch
        together = rollouts(SeededGenerator()).collect([prompts[0], prompts[2]], [3, 7]).batch
        width = alone["response_tokens"].shape[-1]
        assert torch.equal(together["response_tokens"][1, :, :width], alone["response_tokens"][0])

    def test_every_sample_is_a_request_of_its_own(self):
        generator = ScriptedGenerator(ANSWERS)
        rollouts(generator, group_size=3).collect(TWO, [0, 1])
        assert [request.request_id for request in generator.requests] == list(range(6))
        assert [request.prompt_tokens for request in generator.requests] == [TWO[0].tokens] * 3 + [TWO[1].tokens] * 3
        assert {request.sampling.max_tokens for request in generator.requests} == {4}


class TestRewards:
    def test_rewards_see_repeated_columns_texts_and_ids(self):
        seen: dict[str, Any] = {}

        def spy(**inputs: Any) -> list[float]:
            seen.update(inputs)
            return [float(index) for index in range(len(inputs["completions"]))]

        generator = ScriptedGenerator(ANSWERS, finish={1: "length", 5: "length"})
        batch = rollouts(generator, RewardSet({"spy": spy}), group_size=3).collect(TWO, [0, 1]).batch
        assert seen == {
            "prompts": ["prompt 0"] * 3 + ["prompt 1"] * 3,
            "completions": ["1 ?", "0", "1 ? ?", "0 ?", "0 ?", "1"],
            "completion_ids": [[1, 60], [0], [1, 70, 80], [0, 51], [0, 52], [1]],
            "answer": ["0"] * 3 + ["1"] * 3,
            "truncated": [False, True, False, False, False, True],
        }
        assert batch["reward"].tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_components_are_stored_before_weighting_and_may_not_apply(self):
        def sometimes(completions: list[str], **columns: Any) -> list[float | None]:
            return [2.0 if index % 2 else None for index in range(len(completions))]

        reward = RewardSet(
            {"right": first_token_is_one, "style": sometimes}, weights={"style": 0.25}, accuracy_key="right"
        )
        batch = rollouts(ScriptedGenerator(ANSWERS), reward, group_size=3).collect(TWO, [0, 1]).batch
        assert batch["accuracy"].tolist() == [[1, 0, 1], [0, 0, 1]]
        assert batch["reward"].tolist() == [[1, 0.5, 1], [0.5, 0, 1.5]]
        assert batch["rewards", "style"].nan_to_num(-1).tolist() == [[-1, 2, -1], [2, -1, 2]]

    def test_statuses_are_counted_over_all_responses(self, collected):
        assert collected.statuses == {"right": {"ok": 6}}


def test_records_say_what_the_batch_says(collected):
    batch, records = collected.batch, collected.records
    assert [len(group) for group in records] == [3, 3]
    assert records[1][2] == {
        "prompt_id": 1,
        "group_id": 41,
        "sample_id": 2,
        "policy_version": 0,
        "response_length": 1,
        "truncated": False,
        "accuracy": 1.0,
        "reward": 1.0,
        "rewards": {"right": 1.0},
        "prompt": "prompt 1",
        "response": "1",
        "answer": "1",
    }
    for name in ("prompt_id", "group_id", "sample_id", "response_length", "truncated", "accuracy", "reward"):
        assert [[row[name] for row in group] for group in records] == batch[name].tolist()


class TestFailures:
    def test_an_engine_error_stops_with_its_own_words(self):
        generator = ScriptedGenerator(ANSWERS, finish={1: "error", 4: "error"})
        with pytest.raises(GenerationFailed) as caught:
            rollouts(generator, group_size=3).collect(TWO, [0, 1])
        assert str(caught.value).startswith(
            "2 of 6 responses failed in the engine (the first says: scripted error) and 0 are missing; non-finite"
        )

    def test_missing_responses_are_counted(self):
        class Loses(ScriptedGenerator):
            def step(self) -> list[Completion]:
                return [completion for completion in super().step() if completion.request_id != 3]

        with pytest.raises(GenerationFailed, match="0 of 6 responses failed in the engine and 1 are missing"):
            rollouts(Loses(ANSWERS), group_size=3).collect(TWO, [0, 1])

    def test_a_reward_that_fails_is_named(self):
        def broken(completions: list[str], **columns: Any) -> list[float]:
            return [1.0]

        with pytest.raises(RewardFailed, match="reward 'broken' must return one score per completion"):
            rollouts(ScriptedGenerator(ANSWERS), RewardSet({"broken": broken}), group_size=3).collect(TWO, [0, 1])

    def test_every_prompt_needs_a_group_id(self):
        with pytest.raises(ValueError, match="shorter"):
            rollouts(ScriptedGenerator(ANSWERS), group_size=3).collect(TWO, [0])

    def test_group_size_must_be_positive(self):
        with pytest.raises(ValueError, match="group_size must be >= 1, got 0"):
            RolloutCollector(
                SeededGenerator(),
                RewardSet({"right": first_token_is_one}),
                LossyTokenizer(),
                sampling=SamplingParams(max_tokens=1),
                group_size=0,
                seed=0,
            )


def test_rewards_are_told_which_responses_were_cut_off():
    """A response that ends in `#6` at the length limit may have been on its way to `#63`."""
    seen = []

    def reward(completions, truncated):
        seen.extend(truncated)
        return [0.0] * len(completions)

    prompt = Prompt(0, "p", (1, 2), {"answer": "6"})
    generator = ScriptedGenerator({(1, 2): [(3, 4), (5,)]}, finish={0: "length"})
    collector = RolloutCollector(
        generator,
        RewardSet({"r": reward}),
        LossyTokenizer(),
        sampling=SamplingParams(max_tokens=2),
        group_size=2,
        seed=0,
    )
    collector.collect([prompt], [0])
    assert seen == [True, False]
