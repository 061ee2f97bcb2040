"""Soft overlong punishment as a block, and the order score -> filter -> shape -> advantage."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from dapo_components.advantages import GroupNormalizedAdvantage
from dapo_components.filters import NonZeroStdFilter, OverlongFilter
from dapo_components.rewards.overlong import SoftOverlongPunishment


def test_adds_the_penalty_and_records_it():
    # Eq. 13 with a budget of 20 and a buffer of 8: free up to 12, then one eighth per token, -1 from 20 on.
    length = torch.tensor([[0, 12, 13, 16, 20, 24]])
    batch = TensorDict({"reward": torch.tensor([[1.0, -1.0] * 3]), "response_length": length}, batch_size=[1, 6])
    SoftOverlongPunishment(max_length=20, buffer_length=8)(batch)
    assert batch["rewards", "soft_overlong"].tolist() == [[0.0, 0.0, -0.125, -0.5, -1.0, -1.0]]
    assert batch["reward"].tolist() == [[1.0, -1.0, 0.875, -1.5, 0.0, -2.0]]


def test_penalty_scales_and_other_components_stay():
    batch = TensorDict(
        {
            "reward": torch.zeros(1, 2),
            "response_length": torch.tensor([[16, 20]]),
            "rewards": {"math": torch.ones(1, 2)},
        },
        batch_size=[1, 2],
    )
    SoftOverlongPunishment(20, 8, 0.5)(batch)
    assert batch["reward"].tolist() == [[-0.25, -0.5]]
    assert batch["rewards", "math"].tolist() == [[1.0, 1.0]]


def test_keys_plain_tensors_and_number_format():
    shape = SoftOverlongPunishment(20, 8, reward_key=("r", "total"), length_key="n", component_key="penalty")
    batch = TensorDict({"r": {"total": torch.ones(2, 1).double()}, "n": torch.tensor([[16], [20]])}, batch_size=[2, 1])
    shape(batch)
    assert batch["r", "total"].tolist() == [[0.5], [0.0]]
    assert batch["r", "total"].dtype == batch["penalty"].dtype == torch.float64
    reward, penalty = SoftOverlongPunishment(20, 8)(reward=torch.ones(2), response_length=torch.tensor([16, 20]))
    assert (reward.tolist(), penalty.tolist()) == ([0.5, 0.0], [-0.5, -1.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((20, 0), r"buffer_length must be in \(0, max_length=20\], got 0"),
        ((20, 21), "buffer_length must be in"),
        ((20, 8, -1.0), "penalty must be finite and >= 0, got -1.0"),
        ((20, 8, math.inf), "penalty must be finite"),
    ],
)
def test_bad_settings_fail_in_the_constructor(arguments, message):
    with pytest.raises(ValueError, match=message):
        SoftOverlongPunishment(*arguments)


def scored_batch() -> TensorDict:
    """Three groups after scoring: one of two right; both wrong, one of them overlong; both right, one overlong."""
    accuracy = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    length = torch.tensor([[16, 4], [4, 20], [4, 20]])
    return TensorDict(
        {
            "accuracy": accuracy,
            "reward": 2 * accuracy - 1,
            "response_length": length,
            "truncated": length >= 20,
            "loss_mask": torch.arange(20) < length.unsqueeze(-1),
            "group_id": torch.tensor([[7, 7], [8, 8], [9, 9]]),
        },
        batch_size=[3, 2],
    )


def test_the_order_is_score_filter_shape_advantage():
    batch = scored_batch()
    shape = SoftOverlongPunishment(max_length=20, buffer_length=8)
    group_filter, estimate = NonZeroStdFilter(), GroupNormalizedAdvantage(eps=0.0)
    kept = estimate(shape(batch[group_filter(batch).keep]))
    assert kept["group_id"].tolist() == [[7, 7]]
    # Shaped rewards 1 - 1/2 and -1: mean -1/4, deviations +-3/4. Shaping after the advantage would not change it.
    assert kept["reward"].tolist() == [[0.5, -1.0]]
    half_root_two = math.sqrt(0.5)
    torch.testing.assert_close(kept["advantage"], torch.tensor([[half_root_two, -half_root_two]]))
    centred = GroupNormalizedAdvantage(scale="none")(kept)["advantage"]
    assert centred.tolist() == [[0.75, -0.75]]


def test_filtering_after_shaping_gives_the_same_groups_because_accuracy_is_never_shaped():
    batch = scored_batch()
    shaped = SoftOverlongPunishment(max_length=20, buffer_length=8)(batch.clone())
    assert NonZeroStdFilter()(shaped).keep.tolist() == NonZeroStdFilter()(batch).keep.tolist() == [True, False, False]
    # On shaped rewards, the two hopeless groups would pass.
    assert NonZeroStdFilter(key="reward")(shaped).keep.tolist() == [True, True, True]


def test_overlong_filtering_after_the_advantage_keeps_the_row_in_the_statistics():
    batch = scored_batch()
    batch["truncated"] = torch.tensor([[False, True], [False, False], [False, False]])
    estimate = GroupNormalizedAdvantage(scale="none")
    kept = OverlongFilter()(estimate(batch[:1]))
    assert kept["advantage"].tolist() == [[1.0, -1.0]]  # rewards 1 and -1: the truncated row is in the mean
    assert kept["loss_mask"].sum(dim=-1).tolist() == [[16, 0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_number_rewards_keep_the_fraction_of_the_penalty(dtype):
    batch = TensorDict(
        {"reward": torch.tensor([1, 1], dtype=dtype), "response_length": torch.tensor([80, 90])}, batch_size=[2]
    )
    shaped = SoftOverlongPunishment(max_length=100, buffer_length=20)(batch)
    assert shaped["reward"].tolist() == [1.0, 0.5]
