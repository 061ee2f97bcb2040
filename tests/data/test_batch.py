"""Exact layout of batches, joining them, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from dapo_components.data.batch import concatenate, make_batch

PROMPTS = [[5, 6, 7], [8]]
RESPONSES = [[[11, 12], [13]], [[14], [15, 16, 17]]]
LOG_PROBS = [[[-0.5, -0.25], [-1.0]], [[-2.0], [-0.125, -0.5, -4.0]]]


@pytest.fixture
def batch() -> TensorDict:
    return make_batch(PROMPTS, RESPONSES, LOG_PROBS, pad_id=9)


class TestMakeBatch:
    def test_prompts_are_left_padded_and_repeated_for_every_response(self, batch):
        assert batch.batch_size == (2, 2)
        assert batch["prompt_tokens"].tolist() == [[[5, 6, 7]] * 2, [[9, 9, 8]] * 2]
        assert batch["prompt_mask"].tolist() == [[[True, True, True]] * 2, [[False, False, True]] * 2]

    def test_responses_are_right_padded(self, batch):
        assert batch["response_tokens"].tolist() == [[[11, 12, 9], [13, 9, 9]], [[14, 9, 9], [15, 16, 17]]]
        mask = [[[True, True, False], [True, False, False]], [[True, False, False], [True, True, True]]]
        assert batch["response_mask"].tolist() == mask
        assert batch["loss_mask"].tolist() == mask
        assert batch["response_length"].tolist() == [[2, 1], [1, 3]]
        assert batch["rollout_log_prob"].tolist() == [[[-0.5, -0.25, 0], [-1, 0, 0]], [[-2, 0, 0], [-0.125, -0.5, -4]]]

    def test_dtypes_are_those_of_the_key_table(self, batch):
        from dapo_components.data.keys import BATCH_KEYS

        assert {key: batch[key].dtype for key in batch.keys()} == {key: BATCH_KEYS[key].dtype for key in batch.keys()}

    def test_the_pad_id_may_occur_inside_a_response(self):
        batch = make_batch([[9]], [[[9, 4, 9], [4]]], [[[-1.0] * 3, [-1.0]]], pad_id=9)
        assert batch["response_mask"].tolist() == [[[True, True, True], [True, False, False]]]
        assert batch["response_length"].tolist() == [[3, 1]]

    def test_changing_the_loss_mask_leaves_the_response_mask(self, batch):
        batch["loss_mask"][0, 0] = False
        assert batch["response_mask"][0, 0].tolist() == [True, True, False]

    def test_members_of_a_group_do_not_share_memory(self, batch):
        batch["prompt_tokens"][0, 0, 0] = 1
        assert batch["prompt_tokens"][0, 1].tolist() == [5, 6, 7]

    def test_an_empty_response_has_length_zero(self):
        batch = make_batch([[5]], [[[], [7]]], [[[], [-1.0]]], pad_id=0)
        assert batch["response_mask"].tolist() == [[[False], [True]]]
        assert batch["response_length"].tolist() == [[0, 1]]

    def test_group_sizes_must_agree(self):
        with pytest.raises(ValueError, match=r"same number of responses, at least one, got \[1, 2\]"):
            make_batch([[5], [6]], [[[7]], [[8], [9]]], [[[-1.0]], [[-1.0], [-1.0]]], pad_id=0)
        with pytest.raises(ValueError, match=r"at least one, got \[0\]"):
            make_batch([[5]], [[]], [[]], pad_id=0)

    def test_prompts_and_groups_must_agree(self):
        with pytest.raises(ValueError, match="got 2 prompts and 1 groups"):
            make_batch([[5], [6]], [[[7]]], [[[-1.0]]], pad_id=0)
        with pytest.raises(ValueError, match="got 0 prompts and 0 groups"):
            make_batch([], [], [], pad_id=0)

    def test_a_log_prob_per_token_is_required(self):
        with pytest.raises(ValueError, match="response 1 has 2 tokens but 1 log-probs"):
            make_batch([[5]], [[[7], [8, 9]]], [[[-1.0], [-1.0]]], pad_id=0)


class TestConcatenate:
    def test_pads_prompts_left_and_responses_right(self, batch):
        other = make_batch([[3, 4, 5, 6]], [[[1, 2, 3, 4], [1]]], [[[-1.0] * 4, [-1.0]]], pad_id=9)
        joined = concatenate([batch, other], pad_id=9)
        assert joined.batch_size == (3, 2)
        assert joined["prompt_tokens"][:, 0].tolist() == [[9, 5, 6, 7], [9, 9, 9, 8], [3, 4, 5, 6]]
        assert joined["prompt_mask"][:, 0].int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]
        assert joined["response_tokens"][:, 1].tolist() == [[13, 9, 9, 9], [15, 16, 17, 9], [1, 9, 9, 9]]
        assert joined["loss_mask"][:, 1].int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]
        assert joined["rollout_log_prob"][0, 0].tolist() == [-0.5, -0.25, 0, 0]
        assert joined["response_length"].tolist() == [[2, 1], [1, 3], [4, 1]]

    def test_equals_the_batch_made_at_once(self, batch):
        groups = [
            make_batch(PROMPTS[i : i + 1], RESPONSES[i : i + 1], LOG_PROBS[i : i + 1], pad_id=9) for i in range(2)
        ]
        joined = concatenate(groups, pad_id=9)
        assert sorted(joined.keys()) == sorted(batch.keys())
        for key in batch.keys():
            torch.testing.assert_close(joined[key], batch[key], rtol=0, atol=0)

    def test_every_other_key_comes_along(self):
        parts = []
        for number, width in enumerate((2, 3)):
            part = make_batch([[5]], [[[7] * width]], [[[-1.0] * width]], pad_id=0)
            part["reward"] = torch.tensor([[float(number)]])
            part["rewards", "math"] = torch.tensor([[10.0 + number]])
            part["advantage"] = torch.tensor([[20.0 + number]])
            part["step_reward"] = torch.full((1, 1, width), 30.0 + number)
            part["old_log_prob"] = torch.full((1, 1, width), -1.0)
            parts.append(part)
        joined = concatenate(parts, pad_id=0)
        assert joined["reward"].tolist() == [[0], [1]]
        assert joined["rewards", "math"].tolist() == [[10], [11]]
        assert joined["advantage"].tolist() == [[20], [21]]
        assert joined["step_reward"].tolist() == [[[30, 30, 0]], [[31, 31, 31]]]
        assert joined["old_log_prob"].tolist() == [[[-1, -1, 0]], [[-1, -1, -1]]]

    def test_advantages_per_token_are_padded_too(self):
        parts = []
        for width in (2, 3):
            part = make_batch([[5]], [[[7] * width]], [[[-1.0] * width]], pad_id=0)
            part["advantage"] = torch.ones(1, 1, width)
            parts.append(part)
        assert concatenate(parts, pad_id=0)["advantage"].tolist() == [[[1, 1, 0]], [[1, 1, 1]]]

    def test_leaves_its_inputs_alone(self, batch):
        other = make_batch([[1]], [[[1] * 5] * 2], [[[-1.0] * 5] * 2], pad_id=9)
        concatenate([batch, other], pad_id=9)
        assert batch["response_tokens"].shape == (2, 2, 3)

    def test_refuses_nothing_and_unequal_groups(self, batch):
        with pytest.raises(ValueError, match="at least one batch"):
            concatenate([], pad_id=0)
        single = make_batch([[5]], [[[7]]], [[[-1.0]]], pad_id=0)
        with pytest.raises(ValueError, match=r"different group sizes \[1, 2\]"):
            concatenate([batch, single], pad_id=0)
