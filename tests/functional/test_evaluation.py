"""Accuracy estimates and their standard errors."""

from __future__ import annotations

import math

import pytest
import torch

from dapo_components.functional import Estimate, majority_at_k, mean_at_k, pass_at_k
from tests import oracles


def test_mean_at_k_and_its_error_over_problems_by_hand():
    correct = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    estimate = mean_at_k(correct)
    assert isinstance(estimate, Estimate)
    assert estimate.per_problem.tolist() == [1.0, 0.25, 0.0, 0.75]
    assert estimate.value.item() == 0.5
    # Squared distances from the mean: 1/4, 1/16, 1/4, 1/16; their sum over 3, over 4.
    assert estimate.stderr.item() == pytest.approx(math.sqrt(0.625 / 3 / 4), rel=1e-14)


def test_graded_scores_count_as_they_are():
    assert mean_at_k(torch.tensor([[0.5, 1.0], [0.0, 0.5]])).per_problem.tolist() == [0.75, 0.25]


def test_one_problem_has_no_standard_error():
    estimate = mean_at_k(torch.tensor([[1, 0]]))
    assert estimate.value.item() == 0.5
    assert math.isnan(estimate.stderr.item())


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (4, 2, 2, 5 / 6),  # of the six pairs one holds no correct sample
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (4, 3, 2, 1.0),  # fewer than k wrong ones
        (5, 1, 1, 0.2),
        (5, 5, 3, 1.0),
    ],
)
def test_pass_at_k_by_hand(num_samples, num_correct, k, expected):
    estimate = pass_at_k(num_samples, torch.tensor([num_correct]), k)
    assert estimate.value.item() == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_agrees_with_published_numbers():
    cases = [(8, 0), (8, 1), (8, 3), (8, 8), (16, 5), (32, 1)]
    num_samples, num_correct = torch.tensor(cases).unbind(1)
    found = torch.stack([pass_at_k(num_samples, num_correct, k).per_problem for k in (1, 2, 4, 8)], dim=1)
    torch.testing.assert_close(found, oracles.golden()["pass_at_k"], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_pass_at_k_agrees_with_counting_all_choices(k):
    num_correct = torch.arange(8)
    expected = [oracles.pass_at_k(7, c, k) for c in num_correct.tolist()]
    found = pass_at_k(7, num_correct, k)
    torch.testing.assert_close(found.per_problem, torch.tensor(expected, dtype=torch.float64))
    spread = torch.tensor(expected, dtype=torch.float64)
    assert found.stderr.item() == pytest.approx((spread.var(correction=1) / 8).sqrt().item(), rel=1e-12)


def test_pass_at_k_does_not_overflow():
    found = pass_at_k(10_000, torch.tensor([1]), 5_000)
    assert found.value.item() == pytest.approx(0.5, rel=1e-12)


def test_pass_at_1_is_mean_at_k():
    correct = torch.tensor([[1, 0, 1], [0, 0, 1]])
    torch.testing.assert_close(pass_at_k(3, correct.sum(-1), 1).per_problem, mean_at_k(correct).per_problem)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "7", "8"], [1, 1, 0], 1.0),
        (["7", "8", "8"], [1, 0, 0], 0.0),
        (["7", "8"], [1, 0], 0.5),  # a tie, broken at random
        (["7", "8", "9"], [0, 0, 1], 1 / 3),
        (["7", "8", None, None, None], [1, 0, 0, 0, 0], 0.5),  # no answer does not vote
        ([None, None], [0, 0], 0.0),
        (["7", "7"], [1, 0], 0.5),  # a grader that contradicts itself
    ],
)
def test_majority_by_hand(answers, correct, expected):
    assert majority_at_k([answers], [correct]).value.item() == pytest.approx(expected, abs=1e-15)
    assert majority_at_k([answers], torch.tensor([correct])).value.item() == pytest.approx(expected, abs=1e-15)


def test_majority_over_problems_with_unequal_numbers_of_samples():
    estimate = majority_at_k([[1, 1, 2], [3], [4, 5]], [[1, 1, 0], [0], [1, 0]])
    assert estimate.per_problem.tolist() == [1.0, 0.0, 0.5]
    assert estimate.value.item() == 0.5
    assert estimate.stderr.item() == pytest.approx(0.5 / math.sqrt(3), rel=1e-14)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"correct must be \[B, k\] with B, k >= 1, got shape \(3,\)"):
        mean_at_k(torch.ones(3))
    with pytest.raises(ValueError, match="correct must be"):
        mean_at_k(torch.ones(0, 3))
    with pytest.raises(ValueError, match=r"k must be in \[1, num_samples=4\], got 5"):
        pass_at_k(4, torch.tensor([1]), 5)
    with pytest.raises(ValueError, match="k must be in"):
        pass_at_k(4, torch.tensor([1]), 0)
    for count in (-1, 5):
        with pytest.raises(ValueError, match=r"num_correct must be in \[0, num_samples\]"):
            pass_at_k(4, torch.tensor([count]), 1)
    with pytest.raises(ValueError, match="num_correct must be"):
        pass_at_k(4, torch.ones(1, 1), 1)
    with pytest.raises(ValueError, match="got 1 and 2"):
        majority_at_k([["7"]], [[1], [1]])
    with pytest.raises(ValueError, match="problem 0 has 1 answers and 2 entries"):
        majority_at_k([["7"]], [[1, 0]])
    with pytest.raises(ValueError, match="at least one"):
        majority_at_k([], [])
