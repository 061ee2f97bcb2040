from __future__ import annotations

import math

import pytest
import torch

from dapo_components.evaluation import accuracy_metrics, format_metrics

ACCURACY = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])


def test_numbers_worked_out_by_hand():
    metrics = accuracy_metrics(ACCURACY, ks=[2, 1, 4])
    # Problem 1: 1 - C(2,2)/C(4,2) = 5/6. Standard errors: sample deviation over problems / sqrt(3).
    expected = {
        "mean@4": 0.5,
        "mean@4_stderr": 0.5 / math.sqrt(3),
        "pass@1": 0.5,
        "pass@1_stderr": 0.5 / math.sqrt(3),
        "pass@2": (5 / 6 + 0 + 1) / 3,
        "pass@2_stderr": math.sqrt((25 / 36 + 1 - (11 / 6) ** 2 / 3) / 2) / math.sqrt(3),
        "pass@4": 2 / 3,
        "pass@4_stderr": math.sqrt((2 - 4 / 3) / 2) / math.sqrt(3),
    }
    assert list(metrics) == list(expected)
    assert metrics == pytest.approx(expected)


def test_graded_scores_count_as_right_above_the_threshold():
    accuracy = torch.tensor([[0.5, 0.5], [0.6, 0.2]])
    assert accuracy_metrics(accuracy, ks=[2])["mean@2"] == pytest.approx(0.45)
    assert accuracy_metrics(accuracy, ks=[2])["pass@2"] == 0.5  # 0.5 is not above 0.5
    assert accuracy_metrics(accuracy, ks=[2], threshold=0.4)["pass@2"] == 1.0


def test_majority():
    answers = [["7", "7", "8", None], [None] * 4, ["1", "1", "1", "1"]]
    assert accuracy_metrics(ACCURACY, answers=answers)["maj@4"] == pytest.approx(2 / 3)


def test_one_problem_has_no_standard_error():
    assert accuracy_metrics(torch.tensor([[1.0, 0.0]]), ks=[1]) == {"mean@2": 0.5, "pass@1": 0.5}


@pytest.mark.parametrize(
    ("accuracy", "ks", "message"),
    [
        (torch.zeros(3), [], r"accuracy must be \[B, n\] with B, n >= 1, got shape \(3,\)"),
        (torch.zeros(0, 4), [], r"got shape \(0, 4\)"),
        (torch.tensor([[1.0, math.nan]]), [], "accuracy must be finite, got 1 values that are not"),
        (ACCURACY, [5], r"ks must be in \[1, n=4\], got 5; draw more samples"),
        (ACCURACY, [0], r"ks must be in \[1, n=4\], got 0"),
    ],
)
def test_arguments_are_checked(accuracy, ks, message):
    with pytest.raises(ValueError, match=message):
        accuracy_metrics(accuracy, ks=ks)


def test_the_table_lines_up():
    table = format_metrics({"mean@32": 0.125, "mean@32_stderr": 0.0625, "pass@8": 1.0}, digits=3)
    assert table.splitlines() == [
        "metric     value   stderr",
        "mean@32    0.125    0.062",
        "pass@8     1.000        -",
    ]
