"""Advantage blocks: what they read and write, and that settings reach the function."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from dapo_components.advantages import GroupNormalizedAdvantage, LeaveOneOutAdvantage
from dapo_components.functional.advantages import group_normalized_advantage

REWARD = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.7, 0.7, 0.7, 0.7]])


def test_writes_the_advantage_beside_the_reward():
    batch = TensorDict({"reward": REWARD.clone(), "accuracy": REWARD > 0.9}, batch_size=[2, 4])
    out = GroupNormalizedAdvantage()(batch)
    assert out is batch
    torch.testing.assert_close(
        out["advantage"], torch.tensor([[1.5, -0.5, -0.5, -0.5], [0.0] * 4]), rtol=1e-5, atol=0.0
    )
    assert out["advantage"][1].tolist() == [0.0] * 4
    torch.testing.assert_close(out["reward"], REWARD)


@pytest.mark.parametrize("settings", [{"scale": "none"}, {"eps": 0.5}, {"ddof": 0}, {"scale": "none", "rtol": 0.9}])
def test_settings_reach_the_function(settings):
    reward = torch.tensor([[1.0, 0.5], [1.0, 2.0]])
    advantage = GroupNormalizedAdvantage(**settings)(reward=reward)
    torch.testing.assert_close(advantage, group_normalized_advantage(reward, **settings), rtol=0.0, atol=0.0)
    assert not torch.equal(advantage, group_normalized_advantage(reward))


@pytest.mark.parametrize("block", [GroupNormalizedAdvantage, LeaveOneOutAdvantage])
def test_keys_and_usable_rows(block):
    batch = TensorDict(
        {
            "scores": {"outcome": torch.tensor([[3.0, 1.0, float("nan")]])},
            "usable": torch.tensor([[True, True, False]]),
        },
        batch_size=[1, 3],
    )
    # YAML writes a nested key as a list.
    estimate = block(reward_key=["scores", "outcome"], advantage_key=("advantages", "outcome"), valid_key="usable")
    advantage = estimate(batch)["advantages", "outcome"]
    assert advantage[0, 0] > 0
    assert advantage[0, 1] == -advantage[0, 0]
    assert advantage[0, 2] == 0
    assert "advantage" not in batch


def test_leave_one_out_by_hand():
    batch = TensorDict({"reward": REWARD}, batch_size=[2, 4])
    third = 1 / 3
    expected = torch.tensor([[1.0, -third, -third, -third], [0.0] * 4])
    torch.testing.assert_close(LeaveOneOutAdvantage()(batch)["advantage"], expected)


@pytest.mark.parametrize("block", [GroupNormalizedAdvantage, LeaveOneOutAdvantage])
def test_plain_tensors(block):
    batch = TensorDict({"reward": REWARD}, batch_size=[2, 4])
    torch.testing.assert_close(block()(reward=REWARD), block()(batch)["advantage"])
    torch.testing.assert_close(block()(REWARD), batch["advantage"])


@pytest.mark.parametrize("block", [GroupNormalizedAdvantage, LeaveOneOutAdvantage])
def test_a_missing_reward_is_named(block):
    with pytest.raises(KeyError, match="needs the key 'reward', which rewards writes"):
        block()(TensorDict({"accuracy": REWARD}, batch_size=[2, 4]))


@pytest.mark.parametrize("settings", [{"scale": "mean"}, {"eps": -1.0}, {"ddof": 3}, {"rtol": 2.0}])
def test_bad_settings_fail_in_the_constructor(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        GroupNormalizedAdvantage(**settings)
