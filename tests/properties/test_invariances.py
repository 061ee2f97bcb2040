"""What must not change a policy update: padding, order, splits, and the scale of rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from dapo_components.advantages import GroupNormalizedAdvantage, LeaveOneOutAdvantage
from dapo_components.filters import NonZeroStdFilter
from dapo_components.functional.reductions import AGGREGATIONS, BatchCounts
from dapo_components.losses import DAPOLoss
from tests.oracles_policy import grad_of

NAN = float("nan")
PER_TOKEN = ("log_prob", "old_log_prob", "ref_log_prob", "rollout_log_prob", "entropy")
# Losses over tokens of one step: every term is switched on, so that every term is under test.
SETTINGS: dict[str, Any] = {
    "kl_coef": 0.1,
    "entropy_coef": 0.05,
    "rollout_correction": {"level": "sequence"},
    "dual_clip": 2.0,
}

sizes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
seeds = st.integers(0, 2**31 - 1)
modes = st.sampled_from(AGGREGATIONS)


def make_loss(mode: str) -> DAPOLoss:
    return DAPOLoss(aggregation=mode, length_scale=6 if mode == "seq_mean_token_sum_norm" else None, **SETTINGS)


def make_batch(size: tuple[int, int, int], seed: int) -> TensorDict:
    """Random log-probs and a random mask, some rows and groups without a token; NaN where nothing counts."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(size, generator=generator) < torch.rand(size[0], size[1], 1, generator=generator)
    batch = {name: torch.randn(size, generator=generator, dtype=torch.float64) * 0.5 for name in PER_TOKEN}
    batch = {name: torch.where(mask, value, NAN) for name, value in batch.items()}
    batch["advantage"] = torch.randn(size[:2], generator=generator, dtype=torch.float64)
    group_tokens = mask.sum(dim=(1, 2)).unsqueeze(1).expand(size[:2]).clone()
    return TensorDict({**batch, "loss_mask": mask, "group_num_tokens": group_tokens}, batch_size=size[:2])


def loss_and_gradient(mode: str, batch: Any, counts: BatchCounts | None = None):
    log_prob = batch["log_prob"].detach().clone().requires_grad_()
    output = make_loss(mode)(batch.clone(recurse=False).set("log_prob", log_prob), counts=counts or counts_of(batch))
    output.loss.backward()
    return {"loss": output.loss.detach(), **output.metrics()[0]}, grad_of(log_prob)


def counts_of(batch: Any) -> BatchCounts:
    return BatchCounts.from_mask(batch["loss_mask"])


@given(size=sizes, seed=seeds, mode=modes, padding=st.tuples(st.integers(0, 3), st.integers(0, 3)))
@settings(max_examples=60, deadline=None)
def test_extra_padding_changes_nothing(size, seed, mode, padding):
    batch = make_batch(size, seed)
    padded = batch.clone()
    for name in (*PER_TOKEN, "loss_mask"):
        filler = False if name == "loss_mask" else NAN
        padded[name] = torch.nn.functional.pad(batch[name], padding, value=filler)
    values, gradient = loss_and_gradient(mode, batch)
    padded_values, padded_gradient = loss_and_gradient(mode, padded)
    torch.testing.assert_close(padded_values, values)
    torch.testing.assert_close(padded_gradient, torch.nn.functional.pad(gradient, padding))


@given(size=sizes, seed=seeds, mode=modes, rows=st.data())
@settings(max_examples=60, deadline=None)
def test_any_split_into_micro_batches_changes_nothing(size, seed, mode, rows):
    batch = make_batch(size, seed)
    counts = counts_of(batch)
    values, gradient = loss_and_gradient(mode, batch)
    flat = batch.reshape(-1)
    order = rows.draw(st.permutations(range(flat.batch_size[0])))
    cuts = sorted(rows.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    parts = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    totals = {name: torch.zeros((), dtype=value.dtype) for name, value in values.items()}
    split_gradient = torch.zeros_like(gradient).reshape(flat.batch_size[0], -1)
    for part in parts:
        part_values, part_gradient = loss_and_gradient(mode, flat[torch.tensor(part, dtype=torch.int64)], counts)
        split_gradient[part] = part_gradient
        for name, value in part_values.items():
            combine = torch.maximum if name.endswith("_max") else torch.add
            totals[name] = combine(totals[name], value)
    torch.testing.assert_close(totals, values)
    torch.testing.assert_close(split_gradient.reshape(gradient.shape), gradient)


@given(size=sizes, seed=seeds, mode=modes, rows=st.data())
@settings(max_examples=40, deadline=None)
def test_the_order_of_groups_and_of_their_members_changes_nothing(size, seed, mode, rows):
    batch = make_batch(size, seed)
    groups = torch.tensor(rows.draw(st.permutations(range(size[0]))))
    members = torch.tensor(rows.draw(st.permutations(range(size[1]))))
    values, gradient = loss_and_gradient(mode, batch)
    shuffled_values, shuffled_gradient = loss_and_gradient(mode, batch[groups][:, members])
    torch.testing.assert_close(shuffled_values, values)
    torch.testing.assert_close(shuffled_gradient, gradient[groups][:, members])


@given(size=sizes, seed=seeds, mode=modes)
@settings(max_examples=30, deadline=None)
def test_masked_rows_and_groups_are_as_good_as_absent(size, seed, mode):
    batch = make_batch(size, seed)
    absent = torch.cat([batch, batch.clone().set("loss_mask", torch.zeros_like(batch["loss_mask"]))])
    values, gradient = loss_and_gradient(mode, batch)
    more_values, more_gradient = loss_and_gradient(mode, absent)
    torch.testing.assert_close(more_values, values)
    torch.testing.assert_close(more_gradient, torch.cat([gradient, torch.zeros_like(gradient)]))


rewards = st.lists(st.integers(-8, 8), min_size=2, max_size=8)


@given(reward=rewards, shift=st.integers(-64, 64))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("block", [GroupNormalizedAdvantage(), LeaveOneOutAdvantage()])
def test_a_constant_added_to_all_rewards_changes_nothing(block, reward, shift):
    reward = torch.tensor([reward], dtype=torch.float64)
    torch.testing.assert_close(block(reward=reward + shift), block(reward=reward))


@given(reward=rewards, power=st.integers(-6, 6))
@settings(max_examples=100, deadline=None)
def test_the_scale_of_rewards_changes_nothing_when_normalised(reward, power):
    reward = torch.tensor([reward], dtype=torch.float64)
    normalise = GroupNormalizedAdvantage(eps=0.0)
    torch.testing.assert_close(normalise(reward=reward * 2.0**power), normalise(reward=reward))
    centre = GroupNormalizedAdvantage(scale="none")
    torch.testing.assert_close(centre(reward=reward * 2.0**power), centre(reward=reward) * 2.0**power)


@given(reward=rewards, order=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("block", [GroupNormalizedAdvantage(), LeaveOneOutAdvantage()])
def test_advantages_follow_their_rows_and_sum_to_zero(block, reward, order):
    permutation = torch.tensor(order.draw(st.permutations(range(len(reward)))))
    reward = torch.tensor([reward], dtype=torch.float64)
    advantage = block(reward=reward)
    torch.testing.assert_close(block(reward=reward[:, permutation]), advantage[:, permutation])
    torch.testing.assert_close(advantage.sum(), torch.zeros((), dtype=torch.float64), atol=1e-9, rtol=0.0)


@given(seed=seeds, group_size=st.integers(1, 6), score=st.sampled_from([0.7, 0.1, 1.0, 1 / 3]))
@settings(max_examples=60, deadline=None)
def test_a_group_has_an_advantage_exactly_if_the_filter_keeps_it(seed, group_size, score):
    generator = torch.Generator().manual_seed(seed)
    reward = score * torch.randint(0, 2, (5, group_size), generator=generator).float()
    batch = TensorDict({"accuracy": reward, "reward": reward}, batch_size=[5, group_size])
    advantage = GroupNormalizedAdvantage()(batch)["advantage"]
    assert (advantage != 0).any(dim=-1).tolist() == NonZeroStdFilter()(batch).keep.tolist()
