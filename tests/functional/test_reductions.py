"""Masked reductions and the normalisation of a loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dapo_components.functional import (
    AGGREGATIONS,
    BatchCounts,
    aggregate,
    aggregation_weights,
    check_mask,
    masked_mean,
    masked_sum,
    zero_masked,
)
from tests import oracles
from tests.oracles_policy import golden, grad_of, tolerance

NAN = float("nan")
INF = float("inf")

# Two groups of two rows: 3, 1, 2 and 0 valid tokens.
LOSSES = [[[1.0, 2.0, 6.0], [4.0, NAN, INF]], [[-2.0, 8.0, NAN], [NAN, -INF, NAN]]]
MASK = [[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 0]]]


def losses() -> torch.Tensor:
    return torch.tensor(LOSSES, dtype=torch.float64, requires_grad=True)


def mask() -> torch.Tensor:
    return torch.tensor(MASK).bool()


# Worked out by hand from the rows [1, 2, 6], [4], [-2, 8], []: sums 9, 4, 6.
BY_HAND = {
    "token_mean": 19 / 6,
    "seq_mean_token_mean": (3 + 4 + 3) / 3,
    "seq_mean_token_sum": 19 / 3,
    "seq_mean_token_sum_norm": 19 / 3 / 5,
    "group_token_mean": (13 / 4 + 6 / 2) / 2,
}
WEIGHTS_BY_HAND = {
    "token_mean": [1 / 6, 1 / 6, 1 / 6],
    "seq_mean_token_mean": [1 / 9, 1 / 3, 1 / 6],
    "seq_mean_token_sum": [1 / 3, 1 / 3, 1 / 3],
    "seq_mean_token_sum_norm": [1 / 15, 1 / 15, 1 / 15],
    "group_token_mean": [1 / 8, 1 / 8, 1 / 4],
}


def scale_of(mode: str) -> float | None:
    return 5.0 if mode == "seq_mean_token_sum_norm" else None


def test_every_mode_is_worked_out_below():
    assert set(BY_HAND) == set(WEIGHTS_BY_HAND) == set(AGGREGATIONS)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregate_and_its_gradient_by_hand(mode):
    per_token = losses()
    loss = aggregate(per_token, mask(), mode=mode, length_scale=scale_of(mode))
    loss.backward()
    assert loss.item() == pytest.approx(BY_HAND[mode], rel=1e-14)
    row_0, row_1, row_2 = WEIGHTS_BY_HAND[mode]
    expected = [[[row_0] * 3, [row_1, 0, 0]], [[row_2, row_2, 0], [0, 0, 0]]]
    torch.testing.assert_close(grad_of(per_token), torch.tensor(expected, dtype=torch.float64))
    assert (grad_of(per_token)[~mask()] == 0).all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weights_are_what_aggregate_multiplies_with(mode):
    weights = aggregation_weights(mask(), mode=mode, length_scale=scale_of(mode), dtype=torch.float64)
    assert (weights * losses().detach().nan_to_num(0, 0, 0)).sum().item() == pytest.approx(BY_HAND[mode], rel=1e-14)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_counts_replace_the_denominators_and_world_size_multiplies(mode):
    counts = BatchCounts(num_tokens=60, num_sequences=30, num_groups=20, world_size=4)
    loss = aggregate(losses(), mask(), mode=mode, counts=counts, length_scale=scale_of(mode))
    # All three denominators are ten times those of the input alone.
    assert loss.item() == pytest.approx(BY_HAND[mode] * 4 / 10, rel=1e-14)
    as_tensors = BatchCounts(torch.tensor(60), torch.tensor(30.0), torch.tensor(20), 4)
    assert aggregate(losses(), mask(), mode=mode, counts=as_tensors, length_scale=scale_of(mode)).item() == loss.item()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_all_masked_gives_zero_with_a_graph(mode):
    per_token = losses()
    loss = aggregate(per_token, torch.zeros_like(mask()), mode=mode, length_scale=scale_of(mode))
    loss.backward()
    assert loss.item() == 0.0
    assert (grad_of(per_token) == 0).all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_micro_batches_with_common_counts_add_up(mode):
    generator = torch.Generator().manual_seed(1)
    per_token = torch.randn(3, 4, 9, dtype=torch.float64, generator=generator)
    keep = torch.rand(3, 4, 9, generator=generator) < 0.6
    keep[1, 2] = False
    counts = BatchCounts.from_mask(keep)
    group_tokens = keep.sum((-1, -2)).unsqueeze(-1).expand(3, 4).flatten()
    scale = scale_of(mode)
    whole = aggregate(per_token, keep, mode=mode, length_scale=scale)
    expected = oracles.aggregate(
        per_token.flatten(0, 1).numpy(),
        keep.flatten(0, 1).numpy(),
        np.repeat(range(3), 4).tolist(),
        mode,
        length_scale=5.0,
    )
    parts = [
        aggregate(x, m, mode=mode, counts=counts, length_scale=scale, group_num_tokens=tokens)
        for x, m, tokens in zip(
            per_token.flatten(0, 1).split([1, 5, 6]),
            keep.flatten(0, 1).split([1, 5, 6]),
            group_tokens.split([1, 5, 6]),
            strict=True,
        )
    ]
    assert whole.item() == pytest.approx(expected, rel=1e-12)
    assert torch.stack(parts).sum().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", ["b4t7_f64", "b8t17_f32", "b8t17empty_f64"])
def test_group_and_batch_means_agree_with_published_numbers(case):
    data = golden(case)
    log_prob = data["logp"].clone().requires_grad_()
    ratio = zero_masked(log_prob - data["old_logp"], data["mask"]).exp()
    advantage = data["adv_seq"].unsqueeze(-1)
    per_token = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    groups = data["group_index"]
    tokens = data["mask"].sum(-1)
    group_tokens = torch.stack([tokens[groups == index].sum() for index in groups])
    num_groups = len({int(g) for g, n in zip(groups, tokens, strict=True) if n > 0})
    counts = BatchCounts(data["mask"].sum(), (tokens > 0).sum(), num_groups)
    loss = aggregate(per_token, data["mask"], mode="group_token_mean", counts=counts, group_num_tokens=group_tokens)
    (gradient,) = torch.autograd.grad(loss, log_prob, retain_graph=True)
    torch.testing.assert_close(loss, data["own/agg/group_token_mean/loss_group"].to(loss), **tolerance(case))
    torch.testing.assert_close(gradient, data["own/agg/group_token_mean/grad_group"].to(loss), **tolerance(case))
    batch = aggregate(per_token, data["mask"], counts=counts)
    torch.testing.assert_close(batch, data["own/agg/group_token_mean/loss_batch"].to(loss), **tolerance(case))
    half = len(groups) // 2
    parts = [aggregate(per_token[s], data["mask"][s], counts=counts) for s in (slice(half), slice(half, None))]
    torch.testing.assert_close(torch.stack(parts), data["own/agg/microbatch/parts"].to(loss), **tolerance(case))


def test_counts_of_a_batch_of_groups_and_of_rows():
    counts = BatchCounts.from_mask(mask(), world_size=2)
    assert [int(counts.num_tokens), int(counts.num_sequences), int(counts.num_groups)] == [6, 3, 2]
    assert counts.world_size == 2
    rows = BatchCounts.from_mask(mask().flatten(0, 1))
    assert [int(rows.num_tokens), int(rows.num_sequences), int(rows.num_groups)] == [6, 3, 3]


def test_masked_sum_and_mean_by_hand():
    x = torch.tensor([[1.0, 3.0, NAN], [INF, -INF, NAN]], requires_grad=True)
    keep = torch.tensor([[True, True, False], [False, False, False]])
    assert masked_sum(x, keep).item() == 4.0
    assert masked_sum(x, keep, dim=0).tolist() == [1.0, 3.0, 0.0]
    assert masked_mean(x, keep).item() == 2.0
    mean = masked_mean(x, keep, dim=-1)
    assert mean.tolist() == [2.0, 0.0]
    mean.sum().backward()
    assert grad_of(x).tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_a_mask_of_rows_broadcasts_and_its_mean_counts_all_their_elements():
    x = torch.tensor([[1.0, 2.0], [NAN, NAN]])
    rows = torch.tensor([[True], [False]])
    assert masked_mean(x, rows).item() == 1.5
    assert masked_mean(x, rows, dim=-1).tolist() == [1.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_counts_are_not_rounded_to_it(dtype):
    # 259 is no bfloat16: with 260 the mean of 255 ones and 4 zeros would be 0.98047.
    x, keep = torch.ones(1, 259, dtype=dtype), torch.ones(1, 259, dtype=torch.bool)
    x[0, :4] = 0
    expected = torch.tensor(255 / 259, dtype=torch.float64).to(dtype)
    for found in (masked_mean(x, keep), aggregate(x, keep)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert masked_sum(x, keep).dtype == dtype


def test_masks_must_be_boolean():
    x, floats = torch.ones(2, 3), torch.ones(2, 3)
    for call in (masked_sum, masked_mean, zero_masked, aggregate):
        with pytest.raises(TypeError, match=r"mask must be a tensor of dtype torch.bool, got torch.float32"):
            call(x, floats)
    with pytest.raises(TypeError, match="valid must be"):
        check_mask(floats, name="valid")
    with pytest.raises(TypeError, match="got list"):
        check_mask([True])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="mask must be"):
        BatchCounts.from_mask(floats)


def test_shapes_must_fit():
    x, keep = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask must broadcast to the shape of x, \(2, 3\), got \(3, 2\)"):
        masked_sum(x, keep.T)
    with pytest.raises(ValueError, match="must have one shape"):
        aggregate(x, keep[:1])
    with pytest.raises(ValueError, match=r"\[\.\.\., G, T\] or \[N, T\]"):
        BatchCounts.from_mask(keep[0])


def test_options_must_be_possible():
    x, keep = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="mode must be one of token_mean"):
        aggregate(x, keep, mode="mean")
    for scale in (None, 0.0, -1.0, INF):
        with pytest.raises(ValueError, match="length_scale must be a positive number"):
            aggregate(x, keep, mode="seq_mean_token_sum_norm", length_scale=scale)
    with pytest.raises(ValueError, match="needs a mask"):
        aggregate(x, keep, mode="group_token_mean")
    tokens = torch.full((2,), 6)
    with pytest.raises(ValueError, match="needs counts"):
        aggregate(x, keep, mode="group_token_mean", group_num_tokens=tokens)
    counts = BatchCounts.from_mask(keep)
    with pytest.raises(ValueError, match="group_num_tokens must have the shape"):
        aggregate(x, keep, mode="group_token_mean", group_num_tokens=tokens[:1], counts=counts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 1), "num_tokens must be finite and >= 0, got -1"),
        ((1, INF, 1), "num_sequences must be finite"),
        ((1, 1, torch.ones(2)), r"num_groups must be a number or a 0-dim tensor, got shape \(2,\)"),
        ((1, 1, 1, 0), "world_size must be >= 1, got 0"),
    ],
)
def test_counts_must_be_possible(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchCounts(*arguments)
