import pytest
import torch

from dapo_components.collectors import (
    CollectionFailed,
    GenerationFailed,
    RewardFailed,
    collect_on_all_ranks,
    evaluate_on_all_ranks,
    request_seed,
)
from dapo_components.collectors import distributed as module
from dapo_components.rewards import RewardSet
from tests.collectors.scripted import PromptList, SeededGenerator, collector, prompt_ids


def other_rank_reports(monkeypatch, reason, text):
    """Let the gather return what a second rank would have sent."""
    monkeypatch.setattr(module, "all_gather", lambda failure: [failure, (reason, text)])


def test_a_batch_comes_through():
    assert prompt_ids(collect_on_all_ranks(collector("IIII", prompts_per_step=2, oversampling=1.0))) == [0, 1]


def test_exhaustion_is_told_with_the_rank_and_its_counts():
    with pytest.raises(CollectionFailed, match="rank 0: 0 of 1 groups after 2 generation batches") as caught:
        collect_on_all_ranks(collector("HHHHHHHH", prompts_per_step=1, max_gen_batches=2))
    assert caught.value.reason == "exhausted"
    assert not caught.value.weights_are_suspect


def test_what_this_rank_accepted_waits_when_another_one_fails(monkeypatch):
    source = collector("IIIIII", prompts_per_step=2, oversampling=1.0)
    other_rank_reports(monkeypatch, "reward failed", "reward 'x' raised")
    with pytest.raises(CollectionFailed, match=r"^rank 1: reward 'x' raised$") as caught:
        collect_on_all_ranks(source)
    assert caught.value.reason == "reward failed"
    monkeypatch.undo()
    assert prompt_ids(collect_on_all_ranks(source)) == [0, 1]
    assert prompt_ids(collect_on_all_ranks(source)) == [2, 3]


def test_a_failed_engine_on_any_rank_makes_the_weights_suspect(monkeypatch):
    other_rank_reports(monkeypatch, "generation failed", "logits are nan")
    with pytest.raises(CollectionFailed) as caught:
        collect_on_all_ranks(collector("HHHH", prompts_per_step=1, max_gen_batches=1))
    assert caught.value.reason == "generation failed"
    assert caught.value.weights_are_suspect


def test_a_reward_that_raises_is_a_failure_with_its_name():
    def broken(completions):
        raise ZeroDivisionError

    source = collector("II", generator=SeededGenerator(), prompts_per_step=1)
    source.rollouts.reward = RewardSet({"broken": broken})
    with pytest.raises(CollectionFailed, match="rank 0: reward 'broken' raised ZeroDivisionError") as caught:
        collect_on_all_ranks(source)
    assert caught.value.reason == "reward failed"
    assert issubclass(RewardFailed, RuntimeError)
    assert issubclass(GenerationFailed, RuntimeError)


def test_a_rank_without_held_out_prompts_takes_part_in_the_evaluation(monkeypatch):
    source = collector("IIII", generator=SeededGenerator(), prompts_per_step=1).rollouts
    alone = evaluate_on_all_ranks(source, [source_prompt(0), source_prompt(1)])
    assert alone.shape == (2, source.group_size)
    gathered = []

    def gather(item):
        gathered.append(item)
        return [item, alone] if isinstance(item, torch.Tensor) else [item, item]

    monkeypatch.setattr(module, "all_gather", gather)
    assert torch.equal(evaluate_on_all_ranks(source, []), alone)
    assert gathered[-1].shape == (0, source.group_size)


def test_an_evaluation_uses_the_same_seeds_every_time_and_none_of_training():
    generator = SeededGenerator()
    source = collector("IIII", generator=generator, prompts_per_step=1).rollouts
    prompts = [source_prompt(0), source_prompt(1)]
    first, second = evaluate_on_all_ranks(source, prompts), evaluate_on_all_ranks(source, prompts)
    assert torch.equal(first, second)
    held_out = {request_seed(source.seed, -1 - p.prompt_id, p.prompt_id, 0) for p in prompts}
    assert held_out.isdisjoint({request_seed(source.seed, p.prompt_id, p.prompt_id, 0) for p in prompts})


def source_prompt(index):
    return PromptList(2)[index]
