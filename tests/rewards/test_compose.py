from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from dapo_components.rewards import MathReward, RewardResult, RewardSet

NAN = math.nan


def constant(value):
    return lambda completions, **columns: [value] * len(completions)


def score(rewards, completions=("a", "b"), **columns):
    size = len(completions)
    return rewards(prompts=["p"] * size, completions=list(completions), completion_ids=[[1]] * size, **columns)


def half_by_length(prompts, completions, completion_ids, **columns):
    return [len(ids) / 2 for ids in completion_ids]


def test_the_reward_is_the_weighted_sum_and_components_are_kept_before_weighting():
    rewards = RewardSet(
        {"math": MathReward("plain"), "length": half_by_length}, weights={"length": -0.25}, accuracy_key="math"
    )
    scores = rewards(prompts=["p", "p"], completions=["4", "5"], completion_ids=[[1], [1, 2, 3]], answer=["4", "4"])
    assert_close(scores.components["math"], torch.tensor([1.0, -1.0]))
    assert_close(scores.components["length"], torch.tensor([0.5, 1.5]))
    assert_close(scores.reward, torch.tensor([1.0 - 0.125, -1.0 - 0.375]))
    assert_close(scores.accuracy, torch.tensor([1.0, 0.0]))  # correctness, not the score
    assert scores.statuses == {"math": {"ok": 2}, "length": {"ok": 2}}
    second = scores.results["math"][1]
    assert isinstance(second, RewardResult)
    assert second.extracted == "5"
    assert {tensor.dtype for tensor in (scores.accuracy, scores.reward, *scores.components.values())} == {torch.float32}


def test_the_only_component_is_the_accuracy_and_a_plain_float_is_its_own():
    scores = score(RewardSet({"r": lambda completions: [0.75, 0.0]}))
    assert_close(scores.accuracy, torch.tensor([0.75, 0.0]))


def test_a_result_that_scores_without_being_correct():
    rows = [RewardResult(score=0.5, correct=False), RewardResult(score=0.2, correct=True, status="late")]
    scores = score(RewardSet({"r": lambda completions: rows}))
    assert_close(scores.accuracy, torch.tensor([0.0, 1.0]))
    assert_close(scores.reward, torch.tensor([0.5, 0.2]))
    assert scores.statuses == {"r": {"ok": 1, "late": 1}}


def test_none_means_does_not_apply():
    rewards = RewardSet(
        {"a": lambda completions: [1.0, None], "b": lambda completions: [None, None], "c": constant(0.5)},
        accuracy_key="a",
    )
    scores = score(rewards)
    assert_close(scores.reward, torch.tensor([1.5, 0.5]))
    assert_close(scores.components["a"], torch.tensor([1.0, NAN]), equal_nan=True)
    assert_close(scores.accuracy, torch.tensor([1.0, NAN]), equal_nan=True)
    assert scores.statuses["a"] == {"ok": 1, "not_applicable": 1}
    assert scores.results["b"] == [None, None]


def test_a_function_shaped_for_trl_is_called_with_keywords():
    seen = {}

    def reward(prompts, completions, completion_ids, answer, **kwargs):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, answer=answer, **kwargs)
        return [True, 0]

    scores = score(RewardSet({"r": reward}), answer=["x", "y"], level=[1, 2])
    assert_close(scores.reward, torch.tensor([1.0, 0.0]))
    assert seen == {
        "prompts": ["p", "p"], "completions": ["a", "b"], "completion_ids": [[1], [1]], "answer": ["x", "y"],
        "level": [1, 2],
    }  # fmt: skip


def test_configs_name_functions_and_components():
    rewards = RewardSet(
        {
            "half": "tests.rewards.test_compose:half_by_length",
            "math": {"_component_": "dapo_components.rewards.MathReward", "template": "plain", "incorrect": 0.0},
        },
        accuracy_key="math",
    )
    scores = score(rewards, completions=["4", "5"], answer=["4", "4"])
    assert_close(scores.reward, torch.tensor([1.5, 0.5]))


def test_no_responses_give_empty_tensors():
    scores = score(RewardSet({"r": lambda completions: []}), completions=[])
    assert scores.reward.shape == scores.accuracy.shape == (0,)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: [1.0], r"reward 'r' must return one score per completion \(2\), got 1"),
        (lambda completions: [1.0, NAN], "reward 'r' must return finite numbers, got nan at index 1"),
        (lambda completions: [math.inf, 1.0], "reward 'r' must return finite numbers, got inf at index 0"),
        (lambda completions: [1.0, "2"], r"reward 'r' must return a number, None .* got '2' \(str\) at index 1"),
        (lambda completions: [1.0, [2.0]], r"got \[2.0\] \(list\) at index 1"),
        (lambda completions: 1 / 0, "reward 'r' raised ZeroDivisionError: division by zero; .*on_error to 'zero'"),
        (lambda completions, gold: [1.0] * 2, "reward 'r' needs the column 'gold'"),
    ],
)
def test_a_misbehaving_component_is_named(function, message):
    with pytest.raises(ValueError, match=message):
        score(RewardSet({"r": function}))


def test_errors_can_be_counted_instead():
    def fails(completions):
        raise RuntimeError("server gone")

    rewards = RewardSet({"a": fails, "b": lambda completions: [1.0, NAN]}, accuracy_key="a", on_error="zero")
    scores = score(rewards)
    assert_close(scores.reward, torch.tensor([1.0, 0.0]))
    assert_close(scores.accuracy, torch.tensor([0.0, 0.0]))
    assert scores.statuses == {"a": {"error": 2}, "b": {"ok": 1, "error": 1}}
    first = scores.results["a"][0]
    assert isinstance(first, RewardResult)
    assert first.error == "reward 'a' raised RuntimeError: server gone"


def test_a_wrong_length_is_a_mistake_whatever_on_error_says():
    with pytest.raises(ValueError, match="one score per completion"):
        score(RewardSet({"r": lambda completions: []}, on_error="zero"))


def test_ctrl_c_is_not_a_reward_error():
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(RewardSet({"r": interrupted}, on_error="zero"))


def test_columns_have_one_value_per_completion():
    with pytest.raises(ValueError, match=r"answer must have one value per completion \(2\), got 3"):
        score(RewardSet({"r": constant(1.0)}), answer=[1, 2, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": {}}, "rewards must name at least one"),
        ({"weights": {"maths": 1.0}}, "weights names 'maths', which is no reward; did you mean 'math'"),
        ({"weights": {"math": NAN}}, r"weights\['math'\] must be a finite number, got nan"),
        ({"weights": {"math": True}}, r"weights\['math'\] must be a finite number, got True"),
        ({"weights": {"math": "1"}}, r"weights\['math'\] must be a finite number, got '1'"),
        ({"accuracy_key": None}, r"accuracy_key must say which of the rewards \['length', 'math'\]"),
        ({"accuracy_key": "lenght"}, "accuracy_key must name a reward, got 'lenght'; did you mean 'length'"),
        ({"on_error": "skip"}, "on_error must be 'raise' or 'zero', got 'skip'"),
    ],
)
def test_arguments_are_checked(arguments, message):
    defaults = {"rewards": {"math": constant(1.0), "length": constant(1.0)}, "accuracy_key": "math"}
    with pytest.raises(ValueError, match=message):
        RewardSet(**{**defaults, **arguments})
