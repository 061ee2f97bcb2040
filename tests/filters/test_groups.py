"""Group filters: which groups they keep, why, and that they read correctness."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from dapo_components.filters import AccuracyBoundsFilter, NonZeroStdFilter
from dapo_components.functional.lengths import soft_overlong_punishment

NAN = float("nan")


def batch_of(accuracy, **others) -> TensorDict:
    accuracy = torch.as_tensor(accuracy)
    return TensorDict({"accuracy": accuracy, **others}, batch_size=accuracy.shape)


def test_keeps_groups_with_both_outcomes():
    decision = NonZeroStdFilter()(batch_of([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]))
    assert decision.keep.tolist() == [False, True, True, False]
    assert decision.reasons == ["accuracy all 0", "", "", "accuracy all 1"]


@pytest.mark.parametrize("score", [0.7, 0.3, 0.1 + 0.2, -1.0])
@pytest.mark.parametrize("group_size", [2, 7, 16])
def test_equal_scores_that_float32_rounds_are_dropped(score, group_size):
    decision = NonZeroStdFilter()(batch_of(torch.full((3, group_size), score)))
    assert decision.keep.tolist() == [False] * 3
    assert decision.dropped == {f"accuracy all {score:.3g}": 3}


def test_the_tolerance_is_a_range():
    accuracy = torch.tensor([[0.0, 0.5], [0.0, 0.25], [0.0, 0.26]])
    assert NonZeroStdFilter(atol=0.25)(batch_of(accuracy)).keep.tolist() == [True, False, True]


def test_a_group_that_differs_only_by_its_length_penalty_is_dropped():
    # Four wrong answers, one of them overlong: the shaped rewards differ, the group still teaches nothing.
    accuracy = torch.zeros(1, 4)
    penalty = soft_overlong_punishment(torch.tensor([[10, 20, 95, 100]]), max_length=100, buffer_length=20)
    batch = batch_of(accuracy, reward=2 * accuracy - 1 + penalty)
    assert batch["reward"].std() > 0.1
    assert NonZeroStdFilter()(batch).reasons == ["accuracy all 0"]
    assert AccuracyBoundsFilter()(batch).reasons == ["mean accuracy <= 0"]
    # Reading the shaped reward would have kept it, which is why the key is accuracy.
    assert NonZeroStdFilter(key="reward")(batch).keep.tolist() == [True]


def test_bounds_are_strict():
    accuracy = torch.zeros(6, 5)
    for num_correct in range(6):
        accuracy[num_correct, :num_correct] = 1.0
    assert AccuracyBoundsFilter()(batch_of(accuracy)).keep.tolist() == [False, True, True, True, True, False]
    decision = AccuracyBoundsFilter(lower=0.2, upper=0.8)(batch_of(accuracy))
    assert decision.keep.tolist() == [False, False, True, True, False, False]
    assert decision.dropped == {"mean accuracy <= 0.2": 2, "mean accuracy >= 0.8": 2}


def test_bounds_of_other_rewards():
    batch = batch_of(torch.zeros(3, 2), reward=torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]]))
    decision = AccuracyBoundsFilter(lower=-1.0, upper=1.0, key="reward")(batch)
    assert decision.reasons == ["mean reward <= -1", "", "mean reward >= 1"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_any_number_format(dtype):
    accuracy = torch.tensor([[0, 1], [1, 1]], dtype=dtype)
    assert NonZeroStdFilter()(batch_of(accuracy)).keep.tolist() == [True, False]
    assert AccuracyBoundsFilter()(batch_of(accuracy)).keep.tolist() == [True, False]


def test_unusable_rows_do_not_count():
    batch = batch_of([[1.0, 0.0, NAN], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    batch["usable"] = torch.tensor([[True, True, False], [True, True, False], [True, False, False], [False] * 3])
    decision = NonZeroStdFilter(valid_key="usable")(batch)
    assert decision.reasons == ["", "accuracy all 1", *["fewer than 2 usable responses"] * 2]
    decision = AccuracyBoundsFilter(lower=-0.5, upper=0.9, valid_key="usable")(batch)
    assert decision.reasons == ["", *["mean accuracy >= 0.9"] * 2, "no usable response"]


@pytest.mark.parametrize("group_filter", [NonZeroStdFilter(), AccuracyBoundsFilter()])
def test_a_score_that_is_not_a_number_drops_its_group_and_says_so(group_filter):
    decision = group_filter(batch_of([[1.0, NAN], [1.0, 0.0]]))
    assert decision.keep.tolist() == [False, True]
    assert decision.reasons[0].endswith("accuracy not a number")


def test_a_group_of_one_is_dropped():
    assert NonZeroStdFilter()(batch_of([[1.0], [0.0]])).dropped == {"fewer than 2 usable responses": 2}
    assert AccuracyBoundsFilter()(batch_of([[1.0], [0.0]])).keep.tolist() == [False, False]


@pytest.mark.parametrize("filter_class", [NonZeroStdFilter, AccuracyBoundsFilter])
def test_keys_are_arguments(filter_class):
    scores = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    batch = TensorDict({"rewards": {"math": scores}}, batch_size=[2, 2])
    decision = filter_class(key=["rewards", "math"])(batch)
    assert decision.keep.tolist() == [True, False]
    assert "rewards.math" in decision.reasons[1]
    with pytest.raises(KeyError, match=f"{filter_class.__name__} needs the key 'accuracy', which rewards writes"):
        filter_class()(batch)


@pytest.mark.parametrize("group_filter", [NonZeroStdFilter(), AccuracyBoundsFilter()])
def test_an_empty_batch_and_a_missing_group_dimension(group_filter):
    assert group_filter(batch_of(torch.zeros(0, 4))).reasons == []
    with pytest.raises(ValueError, match=r"shape \[B, G\], got \(3,\)"):
        group_filter(batch_of(torch.zeros(3)))


def test_the_batch_is_not_changed():
    batch = batch_of([[1.0, 0.0]])
    NonZeroStdFilter()(batch)
    AccuracyBoundsFilter()(batch)
    assert list(batch.keys()) == ["accuracy"]
    assert batch["accuracy"].tolist() == [[1.0, 0.0]]


def test_bad_settings_fail_in_the_constructor():
    with pytest.raises(ValueError, match="atol must be at least 0, got -1"):
        NonZeroStdFilter(atol=-1.0)
    for lower, upper in ((1.0, 1.0), (0.8, 0.2), (NAN, 1.0)):
        with pytest.raises(ValueError, match="lower must be below upper"):
            AccuracyBoundsFilter(lower=lower, upper=upper)
