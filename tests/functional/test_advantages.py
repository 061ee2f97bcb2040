"""Group advantages: hand-computed numbers, exact zeros, unusable members, published numbers."""

from __future__ import annotations

import math

import pytest
import torch

from dapo_components.functional.advantages import group_normalized_advantage, leave_one_out_advantage
from tests.oracles_policy import GOLDEN_CASES, golden, group_advantage, leave_one_out, pad_groups, tolerance

NAN = float("nan")
INF = float("inf")


def test_two_of_four_correct():
    # mean 1/2, sum of squares 1, std sqrt(1/3): +-sqrt(3)/2
    advantage = group_normalized_advantage(torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64), eps=0.0)
    half_root_three = math.sqrt(3) / 2
    expected = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64) * half_root_three
    torch.testing.assert_close(advantage, expected)


@pytest.mark.parametrize(
    ("arguments", "best", "rest"),
    [
        ({"ddof": 0, "eps": 0.0}, math.sqrt(3), -1 / math.sqrt(3)),  # std sqrt(3)/4
        ({"ddof": 1, "eps": 0.0}, 1.5, -0.5),  # std 1/2
        ({"ddof": 1, "eps": 0.5}, 0.75, -0.25),  # std 1/2 + eps 1/2
        ({"scale": "none"}, 0.75, -0.25),
    ],
)
def test_one_of_four_correct(arguments, best, rest):
    advantage = group_normalized_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0]), **arguments)
    torch.testing.assert_close(advantage, torch.tensor([best, rest, rest, rest]))


def test_default_eps_and_ddof_are_those_of_published_runs():
    reward = torch.tensor([1e-6, 0.0], dtype=torch.float64)  # std 1e-6/sqrt(2), as small as eps
    expected = 0.5e-6 / (1e-6 / math.sqrt(2) + 1e-6)
    torch.testing.assert_close(
        group_normalized_advantage(reward), torch.tensor([expected, -expected], dtype=torch.float64)
    )


@pytest.mark.parametrize("reward", [0.7, 0.1, 0.9, -0.3, 1.0, 0.1 + 0.2, 1e8 + 1])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(reward, group_size, dtype):
    rewards = torch.full((2, group_size), reward, dtype=dtype)
    for eps in (0.0, 1e-9, 1e-6):
        assert group_normalized_advantage(rewards, eps=eps).tolist() == [[0.0] * group_size] * 2
    assert group_normalized_advantage(rewards, scale="none").tolist() == [[0.0] * group_size] * 2
    assert leave_one_out_advantage(rewards).tolist() == [[0.0] * group_size] * 2


@pytest.mark.parametrize("function", [group_normalized_advantage, leave_one_out_advantage])
def test_a_group_of_one_has_no_advantage(function):
    assert function(torch.tensor([[5.0], [-5.0]])).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("function", [group_normalized_advantage, leave_one_out_advantage])
def test_one_usable_member_is_a_group_of_one(function):
    valid = torch.tensor([[True, False, False], [False, False, False]])
    assert function(torch.tensor([[5.0, NAN, 1.0], [1.0, 2.0, 3.0]]), valid=valid).tolist() == [[0.0] * 3] * 2


def test_relative_tolerance_decides_what_is_equal():
    reward = torch.tensor([[100.0, 101.0], [100.0, 102.0], [-100.0, -101.0]], dtype=torch.float64)
    advantage = group_normalized_advantage(reward, scale="none", rtol=0.01)
    assert advantage.tolist() == [[0.0, 0.0], [-1.0, 1.0], [0.0, 0.0]]  # 1 <= 0.01 * 101, but 2 > 0.01 * 102
    assert group_normalized_advantage(reward, scale="none").tolist() == [[-0.5, 0.5], [-1.0, 1.0], [0.5, -0.5]]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_agrees_with_the_loop(scale, ddof):
    generator = torch.Generator().manual_seed(2)
    reward = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    valid = torch.rand(2, 6, 5, generator=generator) < 0.6
    reward[1] = (reward[1] > 0).double()  # 0/1 rewards, some groups equal
    bad = torch.where(valid, reward, NAN)
    advantage = group_normalized_advantage(bad, scale=scale, ddof=ddof, valid=valid)
    unmasked = group_normalized_advantage(reward, scale=scale, ddof=ddof)
    baseline = leave_one_out_advantage(bad, valid=valid)
    for i in range(2):
        for j in range(6):
            rows, usable = reward[i, j].tolist(), valid[i, j].tolist()
            assert advantage[i, j].tolist() == pytest.approx(
                group_advantage(rows, scale=scale, ddof=ddof, valid=usable)
            )
            assert unmasked[i, j].tolist() == pytest.approx(group_advantage(rows, scale=scale, ddof=ddof))
            assert baseline[i, j].tolist() == pytest.approx(leave_one_out(rows, valid=usable))


def test_leave_one_out_by_hand():
    advantage = leave_one_out_advantage(torch.tensor([[3.0, 0.0, 6.0]]))
    torch.testing.assert_close(advantage, torch.tensor([[0.0, -4.5, 4.5]]))  # 3 - 3, 0 - 4.5, 6 - 1.5


def test_leave_one_out_is_the_centred_reward_times_a_constant():
    reward = torch.tensor([[1.0, 0.5, -2.0, 0.0]])
    centred = group_normalized_advantage(reward, scale="none")
    torch.testing.assert_close(leave_one_out_advantage(reward), centred * 4 / 3)


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize(
    ("entry", "function", "arguments"),
    [
        ("own/rec/grpo_std1/adv", group_normalized_advantage, {}),
        ("own/rec/grpo_std0/adv", group_normalized_advantage, {"scale": "none"}),
        ("own/rec/rloo/adv", leave_one_out_advantage, {}),
        ("verl/adv/rloo_vectorized/adv", leave_one_out_advantage, {}),
    ],
)
def test_agrees_with_published_numbers_on_ragged_groups(case, entry, function, arguments):
    arrays = golden(case)
    reward, valid, rows = pad_groups(arrays["rewards"].double(), arrays["group_index"])
    advantage = function(reward, valid=valid, **arguments)
    mask = arrays["mask"]
    compared = 0
    for group, members in enumerate(rows):
        for position, row in enumerate(members):
            expected = arrays[entry][row].double()
            torch.testing.assert_close(
                advantage[group, position].expand_as(expected) * mask[row], expected, **tolerance(case)
            )
            compared += int(mask[row].any())
    assert compared >= 4


def test_large_rewards_keep_their_differences():
    # In float32, 2**24 + 1 is not representable, but the mean of these rewards needs it.
    reward = torch.tensor([2.0**24, 2.0**24 + 2.0, 2.0**24, 2.0**24 + 2.0])
    assert group_normalized_advantage(reward, scale="none").tolist() == [-1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize("function", [group_normalized_advantage, leave_one_out_advantage])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_dtype(function, dtype, expected):
    advantage = function(torch.tensor([[1, 0, 0]], dtype=dtype))
    assert advantage.dtype == expected
    assert advantage[0, 0] > 0 > advantage[0, 1]


@pytest.mark.parametrize("function", [group_normalized_advantage, leave_one_out_advantage])
def test_no_gradient(function):
    assert not function(torch.tensor([1.0, 0.0], requires_grad=True)).requires_grad


@pytest.mark.parametrize("function", [group_normalized_advantage, leave_one_out_advantage])
def test_a_nan_reward_shows_in_its_group_alone(function):
    advantage = function(torch.tensor([[1.0, NAN, 0.0], [1.0, 0.0, 0.0]]))
    assert advantage[0].isnan().all()
    assert advantage[1, 0] > 0
    valid = torch.tensor([True, True, False])
    advantage = function(torch.tensor([1.0, NAN, 5.0]), valid=valid)
    assert advantage[:2].isnan().all()
    assert advantage[2] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "mad"}, "scale must be one of std, none, got 'mad'"),
        ({"scale": None}, "scale must be one of std, none, got None"),
        ({"eps": -1e-6}, "eps must be at least 0"),
        ({"eps": INF}, "eps must be at least 0 and finite"),
        ({"ddof": 2}, "ddof must be 0 or 1, got 2"),
        ({"rtol": -1e-3}, r"rtol must be in \[0, 1\)"),
        ({"rtol": 1.0}, "rtol"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_normalized_advantage(torch.zeros(2), **arguments)


@pytest.mark.parametrize("function", [group_normalized_advantage, leave_one_out_advantage])
def test_valid_must_be_boolean_and_fit(function):
    with pytest.raises(TypeError, match=r"valid must be a tensor of dtype torch\.bool"):
        function(torch.zeros(2, 3), valid=torch.ones(2, 3))
    with pytest.raises(ValueError, match="valid must have the shape"):
        function(torch.zeros(2, 3), valid=torch.ones(3, dtype=torch.bool))
