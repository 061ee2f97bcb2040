"""Which groups carry a signal."""

from __future__ import annotations

import pytest
import torch

from dapo_components.functional import group_spread, informative_mask

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("score", "spread", "informative"),
    [
        ([1.0, 1.0, 1.0], 0.0, False),
        ([0.0, 0.0, 0.0], 0.0, False),
        ([1.0, 0.0, 0.0], 1.0, True),
        ([-1.0, 1.0, -1.0], 2.0, True),
        ([0.25, 0.5, 0.75], 0.5, True),
        ([0.5, NAN, 0.0], NAN, False),
    ],
)
def test_by_hand(score, spread, informative):
    assert group_spread(torch.tensor(score)).item() == pytest.approx(spread, nan_ok=True)
    assert informative_mask(torch.tensor(score)).item() is informative


@pytest.mark.parametrize("value", [0.7, 0.3, 0.1 + 0.2, -0.7])
def test_equal_scores_that_float32_rounds_have_no_spread(value):
    score = torch.full((2, 7), value)
    assert (score.mean(dim=-1) != score[:, 0]).all()  # the trap: not one is its own mean
    assert group_spread(score).tolist() == [0.0, 0.0]
    assert informative_mask(score, atol=0.0).tolist() == [False, False]


def test_the_tolerance_is_a_strict_bound():
    score = torch.tensor([[0.0, 0.25], [0.0, 0.2500001]])
    assert informative_mask(score, atol=0.25).tolist() == [False, True]
    assert informative_mask(torch.tensor([[0.0, 1e-7], [0.0, 1e-5]])).tolist() == [False, True]


def test_only_valid_members_count():
    score = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, NAN], [1.0, NAN, INF], [NAN, 1.0, 0.0], [NAN, NAN, NAN]])
    valid = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]).bool()
    assert group_spread(score, valid=valid).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert informative_mask(score, valid=valid).tolist() == [False, True, False, False, False]


def test_groups_of_one_and_of_none_are_not_informative():
    assert group_spread(torch.tensor([[1.0], [2.0]])).tolist() == [0.0, 0.0]
    assert informative_mask(torch.ones(3, 0)).tolist() == [False] * 3


def test_leading_dimensions_and_dtypes():
    score = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [1, 0]]])
    assert informative_mask(score).tolist() == [[True, False], [False, True]]
    assert group_spread(score).dtype == torch.float32
    assert group_spread(score.bool()).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert group_spread(score.double()).dtype == torch.float64


def test_bad_input_is_refused():
    score = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"valid must be a tensor of dtype torch\.bool"):
        group_spread(score, valid=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"valid must have the shape of score, \(2, 3\), got \(3,\)"):
        group_spread(score, valid=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="score must be"):
        group_spread(torch.tensor(1.0))
    with pytest.raises(ValueError, match="atol must be >= 0, got -1"):
        informative_mask(score, atol=-1)
