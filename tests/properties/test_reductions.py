"""What must not change the loss: padding, order, how a step is cut, and whatever masked positions hold."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_components.functional import AGGREGATIONS, BatchCounts, aggregate, masked_mean, masked_sum
from tests import oracles
from tests.oracles_policy import grad_of

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e300)
pytestmark = pytest.mark.parametrize("mode", AGGREGATIONS)


@dataclass
class Batch:
    """Losses and mask [B, G, T]; the generator is for choices of the test itself."""

    per_token: Tensor
    mask: Tensor
    generator: torch.Generator

    def loss(self, mode: str, **changes: Tensor) -> Tensor:
        per_token, mask = changes.get("per_token", self.per_token), changes.get("mask", self.mask)
        return aggregate(per_token, mask, mode=mode, length_scale=7.0)


@st.composite
def batches(draw) -> Batch:
    shape = [draw(st.integers(1, high)) for high in (4, 4, 6)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    valid_share = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    mask = torch.rand(shape, generator=generator) < valid_share
    return Batch(torch.randn(shape, dtype=torch.float64, generator=generator), mask, generator)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@settings(deadline=None)
@given(batch=batches())
def test_the_loop_over_rows_and_groups_gives_the_same(mode, batch):
    groups = [b for b in range(batch.mask.shape[0]) for _ in range(batch.mask.shape[1])]
    rows = batch.per_token.flatten(0, 1).numpy(), batch.mask.flatten(0, 1).numpy()
    expected = oracles.aggregate(*rows, groups, mode, length_scale=7.0)
    close(batch.loss(mode), torch.tensor(expected, dtype=torch.float64))


@settings(deadline=None)
@given(batch=batches(), width=st.integers(1, 3), garbage=st.sampled_from(GARBAGE))
def test_padding_changes_nothing(mode, batch, width, garbage):
    padding = (*batch.mask.shape[:2], width)
    wider = torch.cat([batch.per_token, torch.full(padding, garbage, dtype=torch.float64)], dim=-1)
    mask = torch.cat([batch.mask, torch.zeros(padding, dtype=torch.bool)], dim=-1)
    close(batch.loss(mode, per_token=wider, mask=mask), batch.loss(mode))


@settings(deadline=None)
@given(batch=batches(), garbage=st.sampled_from(GARBAGE))
def test_what_masked_positions_hold_changes_neither_loss_nor_gradient(mode, batch, garbage):
    clean, dirty = (x.requires_grad_() for x in (batch.per_token.clone(), batch.per_token.clone()))
    with torch.no_grad():
        dirty[~batch.mask] = garbage
    batch.loss(mode, per_token=clean).backward()
    batch.loss(mode, per_token=dirty).backward()
    assert torch.equal(grad_of(dirty), grad_of(clean))
    assert (grad_of(dirty)[~batch.mask] == 0).all()
    assert torch.equal(masked_sum(dirty, batch.mask), masked_sum(clean, batch.mask))
    assert torch.equal(masked_mean(dirty, batch.mask, dim=-1), masked_mean(clean, batch.mask, dim=-1))


@settings(deadline=None)
@given(batch=batches())
def test_the_order_of_groups_samples_and_tokens_changes_nothing(mode, batch):
    orders = [torch.randperm(size, generator=batch.generator) for size in batch.mask.shape]
    index = orders[0][:, None, None], orders[1][None, :, None], orders[2][None, None, :]
    close(batch.loss(mode, per_token=batch.per_token[index], mask=batch.mask[index]), batch.loss(mode))


@settings(deadline=None)
@given(batch=batches(), data=st.data())
def test_any_split_into_micro_batches_and_ranks_adds_up(mode, batch, data):
    """Two ranks with their own micro-batches: the average over ranks of summed losses is the whole loss."""
    mask = batch.mask.flatten(0, 1)
    per_token = batch.per_token.flatten(0, 1)
    group_tokens = batch.mask.sum((-1, -2)).unsqueeze(-1).expand(batch.mask.shape[:2]).flatten()
    counts = BatchCounts.from_mask(batch.mask, world_size=2)
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask))))
    parts = [
        aggregate(
            per_token[owner == part],
            mask[owner == part],
            mode=mode,
            counts=counts,
            length_scale=7.0,
            group_num_tokens=group_tokens[owner == part],
        )
        for part in range(4)
    ]
    first_rank, second_rank = parts[0] + parts[1], parts[2] + parts[3]
    close((first_rank + second_rank) / 2, batch.loss(mode))


@settings(deadline=None)
@given(batch=batches(), factor=st.floats(-3, 3))
def test_the_loss_is_linear_in_the_terms(mode, batch, factor):
    other = torch.randn(batch.mask.shape, dtype=torch.float64, generator=batch.generator)
    close(
        batch.loss(mode, per_token=batch.per_token + factor * other),
        batch.loss(mode) + factor * batch.loss(mode, per_token=other),
    )
