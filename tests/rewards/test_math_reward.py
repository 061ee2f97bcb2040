from __future__ import annotations

import pytest

from dapo_components.rewards import MathReward


def test_scores_correctness_status_and_extraction():
    completions = [r"\boxed{4}", r"\boxed{5}", "4", r"\boxed{2+2}"]
    results = MathReward()(completions=completions, answer=["4"] * 4)
    assert [result.score for result in results] == [1.0, -1.0, -1.0, -1.0]
    assert [result.correct for result in results] == [True, False, False, False]
    assert [result.status for result in results] == ["ok", "ok", "no_answer", "unparsed_pred"]
    assert [result.extracted for result in results] == ["4", "5", None, "2+2"]


def test_the_answer_is_read_as_the_template_asks():
    completions = ["#### 4", r"\boxed{4}", "Answer: 4"]
    scores = [result.score for result in MathReward("gsm8k", 1.0, 0.0)(completions=completions, answer=["4"] * 3)]
    assert scores == [1.0, 0.0, 0.0]


def test_a_number_as_the_right_answer():
    assert MathReward("plain")(completions=["4"], answer=[4])[0].correct


@pytest.mark.parametrize(("template", "expected"), [("plain", False), ("answer_line", False), ("boxed", True)])
def test_a_cut_response_is_wrong_unless_its_answer_is_closed(template, expected):
    completion = {"plain": "4", "answer_line": "Answer: 4", "boxed": r"\boxed{4} because"}[template]
    reward = MathReward(template)
    assert reward(completions=[completion], answer=["4"])[0].correct
    assert reward(completions=[completion], answer=["4"], truncated=[True])[0].correct is expected


def test_each_response_is_compared_with_its_own_answer():
    results = MathReward("plain")(completions=["1", "2", "3"], answer=["3", "2", "1"], level=[1, 1, 1])
    assert [result.correct for result in results] == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"template": "box"}, "did you mean 'boxed'"),
        ({"correct": 0.0, "incorrect": 0.0}, r"correct must be finite and above incorrect, got correct=0\.0"),
        ({"correct": float("inf")}, "correct must be finite"),
        ({"timeout_s": 0}, "timeout_s must be > 0, got 0"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        MathReward(**arguments)


def test_one_answer_per_completion():
    with pytest.raises(ValueError, match=r"one value per completion \(2\), got 1 and 2"):
        MathReward()(completions=["a", "b"], answer=["1"])
