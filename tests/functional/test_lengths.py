"""Overlong shaping and truncated rows."""

from __future__ import annotations

import pytest
import torch

from dapo_components.functional import mask_truncated, soft_overlong_punishment, truncation_mask
from tests import oracles


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0.0),
        (15, 0.0),
        (16, 0.0),  # the last length without a penalty: 20 - 4
        (17, -0.5),
        (18, -1.0),
        (19, -1.5),
        (20, -2.0),  # the limit itself takes all of it
        (21, -2.0),  # and no length takes more
        (2000, -2.0),
    ],
)
def test_each_side_of_each_corner(length, expected):
    penalty = soft_overlong_punishment(torch.tensor(length), max_length=20, buffer_length=4, penalty=2.0)
    assert penalty.item() == expected


@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_agrees_with_published_numbers_up_to_the_limit_and_stays_at_the_floor(penalty):
    lengths = torch.arange(1, 25)
    found = soft_overlong_punishment(lengths, max_length=20, buffer_length=8, penalty=penalty)
    torch.testing.assert_close(found[:20], oracles.golden()[f"overlong/{penalty}"].float()[:20])
    assert (found[20:] == -penalty).all()
    expected = [oracles.soft_overlong_punishment(length, 20, 8, penalty) for length in lengths.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("penalty", [0.1, 0.7, 1.0, 3.3])
@pytest.mark.parametrize(("max_length", "buffer_length"), [(20480, 4096), (100, 7), (3, 3)])
def test_the_floor_is_the_penalty_to_the_bit(penalty, max_length, buffer_length):
    lengths = torch.tensor([max_length, max_length + 1, 10 * max_length])
    found = soft_overlong_punishment(lengths, max_length=max_length, buffer_length=buffer_length, penalty=penalty)
    assert torch.equal(found, torch.full((3,), -penalty))


def test_shape_and_dtype():
    lengths = torch.tensor([[1, 20], [18, 30]])
    found = soft_overlong_punishment(lengths, max_length=20, buffer_length=4)
    assert found.tolist() == [[0.0, -1.0], [-0.5, -1.0]]
    assert found.dtype == torch.float32
    assert soft_overlong_punishment(lengths.double(), max_length=20, buffer_length=4).dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 10, "buffer_length": 0}, r"buffer_length must be in \(0, max_length=10\], got 0"),
        ({"max_length": 10, "buffer_length": 11}, r"buffer_length must be in \(0, max_length=10\], got 11"),
        ({"max_length": 10, "buffer_length": 5, "penalty": -1.0}, "penalty must be finite and >= 0, got -1.0"),
        ({"max_length": 10, "buffer_length": 5, "penalty": float("nan")}, "penalty must be finite and >= 0, got nan"),
    ],
)
def test_impossible_shaping_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        soft_overlong_punishment(torch.tensor([1]), **arguments)


def test_truncated_is_no_stop_token_at_the_end():
    tokens = torch.tensor(
        [
            [5, 6, 7, 2],  # stops exactly at the limit
            [5, 2, 7, 8],  # stops early; what follows is no part of it
            [5, 6, 7, 8],  # cut off at the limit
            [5, 2, 7, 0],  # a stop token in the middle does not count
            [5, 6, 9, 0],  # the other stop token
            [5, 6, 7, 8],  # no token at all
            [5, 0, 6, 2],  # a tool's tokens between the policy's
        ]
    )
    keep = torch.tensor(
        [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]
    ).bool()
    expected = [False, False, True, True, False, False, False]
    assert truncation_mask(tokens, keep, stop_token_ids=(2, 9)).tolist() == expected
    assert truncation_mask(tokens[None], keep[None], stop_token_ids=(2, 9)).tolist() == [expected]
    assert truncation_mask(tokens[:, :0], keep[:, :0], stop_token_ids=[2]).tolist() == [False] * 7


def test_truncated_rows_leave_the_loss_mask():
    keep = torch.tensor([[[True, True], [True, False]]])
    assert mask_truncated(keep, torch.tensor([[False, True]])).tolist() == [[[True, True], [False, False]]]
    assert keep.all(dim=-1).tolist() == [[True, False]]  # the input is left as it was


def test_bad_masks_are_refused():
    tokens, keep = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match="mask must be"):
        truncation_mask(tokens, keep.float(), stop_token_ids=[2])
    with pytest.raises(ValueError, match="one shape"):
        truncation_mask(tokens, keep[:1], stop_token_ids=[2])
    with pytest.raises(ValueError, match="at least one id"):
        truncation_mask(tokens, keep, stop_token_ids=[])
    with pytest.raises(TypeError, match=r"truncated must be a tensor of dtype torch\.bool, got torch\.int64"):
        mask_truncated(keep, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"truncated must have the shape .*\(2,\), got \(3,\)"):
        mask_truncated(keep, torch.zeros(3, dtype=torch.bool))
