"""Measurements of an update: worked out by hand, additive over any split, free of the world size."""

from __future__ import annotations

import math

import pytest
import torch

from dapo_components.functional.diagnostics import (
    clip_diagnostics,
    per_rank,
    ratio_diagnostics,
    rollout_diagnostics,
    token_share,
)
from dapo_components.functional.reductions import BatchCounts

NAN = float("nan")
INF = float("inf")
# Three counted tokens with ratios 2, 1/2 and 1; what lies at the other three must not matter.
MASK = torch.tensor([[True, True, False], [True, False, False]])
LOG_RATIO = torch.tensor([[math.log(2.0), -math.log(2.0), NAN], [0.0, INF, -INF]])


def as_floats(values):
    return {name: value.item() for name, value in values.items()}


def test_ratio_diagnostics_by_hand():
    values = ratio_diagnostics(LOG_RATIO - 1.0, torch.full((2, 3), -1.0), MASK)
    assert as_floats(values) == pytest.approx(
        {
            "ratio_mean": 3.5 / 3,
            "approx_kl_k1": 0.0,  # -log 2 + log 2 + 0
            "approx_kl_k3": 0.5 / 3,  # (1 - log 2) + (-1/2 + log 2) + 0
            "log_ratio_max": math.log(2.0),
        },
        abs=1e-6,
    )


def test_kl_is_measured_from_old_to_new():
    # A token that became rarer: -d = log 2 is what KL(old || new) adds up.
    values = ratio_diagnostics(torch.tensor([[-math.log(2.0)]]), torch.zeros(1, 1), torch.tensor([[True]]))
    assert values["approx_kl_k1"].item() == pytest.approx(math.log(2.0))
    assert values["approx_kl_k3"].item() == pytest.approx(math.log(2.0) - 0.5)
    assert values["log_ratio_max"].item() == pytest.approx(math.log(2.0))


def test_the_maximum_is_not_bounded_but_the_means_are():
    values = ratio_diagnostics(torch.tensor([[50.0]]), torch.zeros(1, 1), torch.tensor([[True]]))
    assert values["log_ratio_max"].item() == 50.0
    assert values["approx_kl_k1"].item() == -20.0
    assert values["ratio_mean"].item() == pytest.approx(math.exp(20.0))


def test_clip_diagnostics_by_hand():
    ratio = torch.tensor([[2.0, 2.0, 0.5, 0.5, 1.0, 4.0, 4.0, NAN]])
    advantage = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[True] * 7 + [False]])
    values = clip_diagnostics(ratio.log(), advantage, mask, dual_clip=3.0)
    assert as_floats(values) == pytest.approx(
        {"clip_ratio_low_mean": 1 / 7, "clip_ratio_high_mean": 2 / 7, "clip_ratio_dual_mean": 1 / 7}
    )
    assert set(clip_diagnostics(ratio.log(), advantage, mask)) == {"clip_ratio_low_mean", "clip_ratio_high_mean"}


def test_rollout_diagnostics_by_hand():
    weight = torch.tensor([[2.0, 0.5, NAN], [1.0, NAN, NAN]])
    values = rollout_diagnostics(LOG_RATIO, torch.zeros(2, 3), MASK, weight=weight)
    assert as_floats(values) == pytest.approx(
        {
            "rollout_mismatch_mean": 2 * math.log(2.0) / 3,
            "rollout_mismatch_max": math.log(2.0),
            "correction_weight_mean": 3.5 / 3,
            "correction_weight_square_mean": 5.25 / 3,
        }
    )
    without = rollout_diagnostics(LOG_RATIO, torch.zeros(2, 3), MASK)
    assert set(without) == {"rollout_mismatch_mean", "rollout_mismatch_max"}


def test_token_share_uses_the_counts_of_the_step_and_never_the_world_size():
    x = torch.tensor([[3.0, 5.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    assert token_share(x, mask).item() == 4.0
    for world_size in (1, 2, 8):
        counts = BatchCounts(num_tokens=torch.tensor(16), num_sequences=3, num_groups=2, world_size=world_size)
        assert token_share(x, mask, counts=counts).item() == 0.5
        assert per_rank(counts) == BatchCounts(counts.num_tokens, 3, 2, 1)
    assert per_rank(None) is None


def test_shares_of_a_split_add_up():
    generator = torch.Generator().manual_seed(4)
    log_prob, old, advantage, rollout = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    counts = BatchCounts.from_mask(mask)

    def measure(rows):
        parts = log_prob[rows], old[rows], mask[rows]
        values = ratio_diagnostics(*parts, counts=counts)
        values |= clip_diagnostics(log_prob[rows] - old[rows], advantage[rows], mask[rows], counts=counts)
        values |= rollout_diagnostics(old[rows], rollout[rows], mask[rows], weight=rollout[rows].exp(), counts=counts)
        return values

    whole, first, second = measure(slice(0, 6)), measure(slice(0, 1)), measure(slice(1, 6))
    for name, value in whole.items():
        combined = torch.maximum(first[name], second[name]) if name.endswith("_max") else first[name] + second[name]
        torch.testing.assert_close(combined, value)
        assert value != 0.0
        assert first[name] != value or name.endswith("_max")


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_counted_measures_zero(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    x = torch.full(shape, NAN)
    values = {
        **ratio_diagnostics(x, x, mask),
        **clip_diagnostics(x, x, mask, dual_clip=3.0),
        **rollout_diagnostics(x, x, mask, weight=x),
    }
    assert set(as_floats(values).values()) == {0.0}


def test_nothing_carries_a_gradient():
    x = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    values = {
        **ratio_diagnostics(x, x, mask),
        **clip_diagnostics(x, x, mask),
        **rollout_diagnostics(x, x, mask, weight=x),
        "share": token_share(x, mask),
    }
    assert not any(value.requires_grad for value in values.values())


def test_half_precision_is_measured_in_float32():
    x = torch.tensor([[0.25]], dtype=torch.bfloat16)
    values = ratio_diagnostics(x, torch.zeros_like(x), torch.tensor([[True]]))
    assert values["ratio_mean"].item() == pytest.approx(math.exp(0.25), rel=1e-6)
