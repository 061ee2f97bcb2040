from __future__ import annotations

import functools

import pytest
import torch

from dapo_components.rewards.functions import accepted_inputs, resolve_reward, score_list
from dapo_components.rewards.math_reward import MathReward

INPUTS = {"prompts": ["p"], "completions": ["c"], "completion_ids": [[1]], "answer": ["a"], "level": [2]}


def constant(prompts, completions, completion_ids, **columns):
    return [0.25] * len(completions)


def test_resolving():
    assert resolve_reward("c", constant) is constant
    assert resolve_reward("c", "tests.rewards.test_functions:constant")(None, "ab", None) == [0.25, 0.25]
    built = resolve_reward("m", {"_component_": "dapo_components.rewards.MathReward", "template": "plain"})
    assert isinstance(built, MathReward)
    assert built.template.name == "plain"


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("tests.rewards.test_functions:constnt", "did you mean 'constant'"),
        (
            "dapo_components.rewards:MathReward",
            "reward 'm' must be a function or an instance, got the class MathReward",
        ),
        ({"template": "plain"}, "reward 'm' must be callable, an import path or a mapping with _component_"),
        (3.0, "reward 'm' must be callable, .* got 3.0"),
        ({"_component_": "dapo_components.rewards.MathReward", "tmplate": "plain"}, "tmplate"),
    ],
)
def test_what_cannot_be_resolved_is_explained(reward, message):
    with pytest.raises(ValueError, match=message):
        resolve_reward("m", reward)


def test_a_function_gets_what_it_takes():
    assert accepted_inputs("f", lambda **columns: None, INPUTS) == INPUTS
    assert accepted_inputs("f", lambda completions, answer: None, INPUTS) == {"completions": ["c"], "answer": ["a"]}
    assert accepted_inputs("f", lambda completions, other=1, *, level=0: None, INPUTS) == {
        "completions": ["c"],
        "level": [2],
    }
    assert accepted_inputs("f", functools.partial(constant, extra=1), INPUTS) == INPUTS


def test_a_missing_column_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"reward 'f' needs the column 'answers'.*did you mean 'answer'"):
        accepted_inputs("f", lambda completions, answers: None, INPUTS)


def test_lists_tuples_tensors_and_generators_of_scores():
    assert score_list("f", (1, None), 2) == [1, None]
    assert score_list("f", torch.tensor([1.0, 0.5]), 2) == [1.0, 0.5]
    assert score_list("f", (number for number in (1.0, 2.0)), 2) == [1.0, 2.0]


async def asynchronous():
    return [1.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"reward 'f' must return one score per completion \(2\), got 1"),
        (1.0, r"reward 'f' must return a list .*, got 1\.0 \(float\)"),
        (torch.tensor(1.0), "must return a list"),
        (None, r"must return a list .*, got None \(NoneType\)"),
        ("ab", "must return a list"),
        ({"a": 1, "b": 2}, "must return a list"),
    ],
)
def test_other_forms_are_refused(returned, message):
    with pytest.raises(ValueError, match=message):
        score_list("f", returned, 2)


def test_an_async_function_is_refused():
    with pytest.raises(ValueError, match="reward 'f' must be a plain function, got an async one"):
        score_list("f", asynchronous(), 1)
