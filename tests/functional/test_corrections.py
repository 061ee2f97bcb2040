"""Rollout correction weights: hand-computed values at every level and mode, an oracle loop, published numbers."""

from __future__ import annotations

import math

import pytest
import torch

from dapo_components.functional.corrections import (
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    check_rollout_correction,
    rollout_correction_weights,
)
from tests.oracles_policy import GOLDEN_CASES, correction_weights, golden, tolerance

NAN = float("nan")
INF = float("inf")


def weights(ratios: list[list[float]], mask: list[list[int]] | None = None, **arguments) -> list[list[float]]:
    """Weights of rows whose tokens have these ratios of trainer to sampler probability."""
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()
    rollout = torch.full_like(log_ratio, -1.5)
    selected = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    return rollout_correction_weights(rollout + log_ratio, rollout, selected, **arguments).tolist()


def approx(rows):
    return [pytest.approx(row) for row in rows]


def test_token_truncate_bounds_from_above_only():
    assert weights([[3.0, 2.0, 1.9, 0.01]]) == approx([[2.0, 2.0, 1.9, 0.01]])


def test_token_mask_zeroes_outside_both_bounds():
    rows = weights([[5.1, 4.9, 1.0, 0.51, 0.49]], mode="mask", upper=5.0, lower=0.5)
    assert rows == approx([[0.0, 4.9, 1.0, 0.51, 0.0]])


def test_mask_without_a_lower_bound_keeps_small_weights():
    assert weights([[2.1, 0.001]], mode="mask") == approx([[0.0, 0.001]])


def test_mask_keeps_a_weight_on_its_bound():
    old, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    rows = rollout_correction_weights(old, old, mask, mode="mask", upper=1.0, lower=1.0)
    assert rows.tolist() == [[1.0, 1.0]]


def test_sequence_level_multiplies_the_counted_tokens_of_a_row():
    ratios, mask = [[1.5, 1.2, 9.0], [3.0, 0.2, 9.0]], [[1, 1, 0], [1, 1, 0]]
    assert weights(ratios, mask, level="sequence") == approx([[1.8, 1.8, 0.0], [0.6, 0.6, 0.0]])
    truncated = weights(ratios, mask, level="sequence", upper=1.5)
    assert truncated == approx([[1.5, 1.5, 0.0], [0.6, 0.6, 0.0]])
    masked = weights(ratios, mask, level="sequence", mode="mask", upper=1.5)
    assert masked == approx([[0.0, 0.0, 0.0], [0.6, 0.6, 0.0]])


def test_geometric_level_takes_the_root():
    ratios, mask = [[4.0, 1.0, 9.0], [1.44, 1.0, 1.0]], [[1, 1, 0], [1, 1, 0]]
    assert weights(ratios, mask, level="geometric", upper=5.0) == approx([[2.0, 2.0, 0.0], [1.2, 1.2, 0.0]])
    masked = weights(ratios, mask, level="geometric", mode="mask", upper=1.5, lower=0.5)
    assert masked == approx([[0.0, 0.0, 0.0], [1.2, 1.2, 0.0]])


def test_long_responses_stay_finite():
    # 2000 tokens of ratio 2: exp(1386) overflows; the bound on the sum keeps it at exp(20).
    (row,) = weights([[2.0] * 2000], level="sequence", upper=1e9)
    assert row[0] == pytest.approx(math.exp(20.0))
    (row,) = weights([[0.5] * 2000], level="sequence")
    assert row[0] == pytest.approx(math.exp(-20.0))


@pytest.mark.parametrize("level", CORRECTION_LEVELS)
def test_a_row_without_tokens_is_zero(level):
    assert weights([[3.0, 3.0], [1.0, 1.0]], [[0, 0], [1, 1]], level=level) == approx([[0.0, 0.0], [1.0, 1.0]])


@pytest.mark.parametrize("level", CORRECTION_LEVELS)
@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_agrees_with_the_loop(level, mode):
    generator = torch.Generator().manual_seed(3)
    old, rollout = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64) * 0.5
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[4] = False
    arguments = {"level": level, "mode": mode, "upper": 1.3, "lower": 0.6 if mode == "mask" else None}
    actual = rollout_correction_weights(old, rollout, mask, **arguments)
    expected = correction_weights(old.tolist(), rollout.tolist(), mask.tolist(), **arguments)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
    # The seed reaches the bounds, and not everywhere.
    free = correction_weights(old.tolist(), rollout.tolist(), mask.tolist(), **{**arguments, "upper": 1e9, "lower": 0})
    unchanged = torch.isclose(actual, torch.tensor(free, dtype=torch.float64))[mask]
    assert 0 < unchanged.sum() < unchanged.numel()


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("bounds", "arguments"),
    [("th2.0", {"upper": 2.0}), ("th0.5_5.0", {"mode": "mask", "upper": 5.0, "lower": 0.5})],
)
def test_agrees_with_published_weights(case, level, bounds, arguments):
    arrays = golden(case)
    actual = rollout_correction_weights(
        arrays["old_logp"], arrays["rollout_logp"], arrays["mask"], level=level, **arguments
    )
    expected = arrays[f"verl/rollout/{level}_{bounds}_bn0/weights"].to(actual.dtype)
    torch.testing.assert_close(actual, expected, **tolerance(case))


@pytest.mark.parametrize("level", CORRECTION_LEVELS)
@pytest.mark.parametrize("mode", CORRECTION_MODES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_masked_positions_may_hold_anything(level, mode, bad):
    old, rollout = torch.tensor([[0.2, bad]]), torch.tensor([[0.0, bad]])
    mask = torch.tensor([[True, False]])
    actual = rollout_correction_weights(old, rollout, mask, level=level, mode=mode)
    torch.testing.assert_close(actual, torch.tensor([[math.exp(0.2), 0.0]]))


@pytest.mark.parametrize("level", CORRECTION_LEVELS)
def test_weights_carry_no_gradient(level):
    old = torch.zeros(1, 2, requires_grad=True)
    rollout = torch.zeros(1, 2, requires_grad=True)
    assert not rollout_correction_weights(old, rollout, torch.ones(1, 2, dtype=torch.bool), level=level).requires_grad


def test_half_precision_is_computed_in_float32():
    old, rollout = torch.tensor([[0.25]], dtype=torch.bfloat16), torch.tensor([[0.0]], dtype=torch.bfloat16)
    actual = rollout_correction_weights(old, rollout, torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(actual, torch.tensor([[math.exp(0.25)]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "word"}, "level must be one of token, sequence, geometric, got 'word'"),
        ({"mode": "clip"}, "mode must be one of truncate, mask, got 'clip'"),
        ({"upper": 0.0}, "upper must be above 0"),
        ({"upper": INF}, "upper must be above 0 and finite"),
        ({"lower": 0.5}, "lower is used by mode='mask' only"),
        ({"mode": "mask", "lower": 3.0}, r"lower must be in \[0, upper=2.0\], got 3.0"),
        ({"mode": "mask", "lower": -0.1}, "lower must be in"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        weights([[1.0]], **arguments)
    with pytest.raises(ValueError, match=message):
        check_rollout_correction(arguments)


def test_unknown_arguments_are_refused():
    with pytest.raises(ValueError, match="takes level, mode, upper and lower, got threshold"):
        check_rollout_correction({"level": "token", "threshold": 2.0})


def test_mask_must_be_boolean_and_shapes_agree():
    with pytest.raises(TypeError, match=r"torch\.bool"):
        rollout_correction_weights(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="one shape"):
        rollout_correction_weights(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2, dtype=torch.bool))
