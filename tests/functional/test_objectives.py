"""The whole objective: oracle loops, published losses and gradients, splits, missing inputs, compilation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dapo_components.functional.objectives import clipped_policy_objective, regularized_objective
from dapo_components.functional.reductions import AGGREGATIONS, BatchCounts
from tests.oracles_policy import (
    GOLDEN_CASES,
    clipped_gradient,
    clipped_loss,
    correction_weights,
    golden,
    grad_of,
    kl_value,
    loss_weights,
    tolerance,
)

NAN = float("nan")
PUBLISHED_MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}


# One of the published modes adds 1e-8 to the length of a row.
ROUNDING = {"atol": 1e-8}


def check_against(arrays, name, case, advantage, **arguments):
    log_prob = arrays["logp"].clone().requires_grad_()
    loss = clipped_policy_objective(log_prob, arrays["old_logp"], advantage, arrays["mask"], **arguments)["loss"]
    loss.backward()
    torch.testing.assert_close(loss, arrays[f"{name}/loss"].to(loss.dtype), **tolerance(case, **ROUNDING))
    torch.testing.assert_close(
        grad_of(log_prob), arrays[f"{name}/grad_logp"].to(loss.dtype), **tolerance(case, **ROUNDING)
    )


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize("bounds", [(0.2, 0.2, 3.0), (0.2, 0.28, 10.0), (0.2, 0.28, 1.2)])
@pytest.mark.parametrize(
    ("mode", "level"),
    [*((mode, "seq") for mode in PUBLISHED_MODES), ("token-mean", "tok"), ("seq-mean-token-mean", "tok")],
)
def test_agrees_with_published_losses(case, bounds, mode, level):
    low, high, dual = bounds
    arrays = golden(case)
    name = f"verl/loss/vanilla_lo{low}_hi{high}_c{dual}_{mode}_{level}"
    check_against(
        arrays,
        name,
        case,
        arrays[f"adv_{level}"],
        clip_eps_low=low,
        clip_eps_high=high,
        dual_clip=dual,
        aggregation=PUBLISHED_MODES[mode],
        # The published number divides by the padded width of its batch.
        length_scale=arrays["mask"].shape[1] if mode.endswith("norm") else None,
    )


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize("mode", PUBLISHED_MODES)
def test_agrees_with_published_losses_under_given_denominators(case, mode):
    arrays = golden(case)
    # Two ranks, 200 tokens and 16 responses in the whole step.
    counts = BatchCounts(num_tokens=200, num_sequences=torch.tensor(16), num_groups=1, world_size=2)
    check_against(
        arrays,
        f"verl/loss/vanilla_global_{mode}",
        case,
        arrays["adv_seq"],
        dual_clip=10.0,
        aggregation=PUBLISHED_MODES[mode],
        length_scale=64 if mode.endswith("norm") else None,
        counts=counts,
    )


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize(("library", "entry"), [("verl", "vanilla_tis_token-mean"), ("trl", "dapo_token_truncate2")])
def test_agrees_with_published_rollout_corrections(case, library, entry):
    arrays = golden(case)
    check_against(
        arrays,
        f"{library}/loss/{entry}",
        case,
        arrays["adv_seq"],
        dual_clip=10.0 if library == "verl" else None,
        rollout_log_prob=arrays["rollout_logp"],
        rollout_correction={"level": "token", "mode": "truncate", "upper": 2.0},
    )


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_agrees_with_published_kl_in_the_loss(case):
    arrays = golden(case)
    name = "trl/loss/dapo_beta0.04_biascorr0"
    check_against(arrays, name, case, arrays["adv_seq"], ref_log_prob=arrays["ref_logp"], kl_coef=0.04)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_agrees_with_the_group_normaliser_of_the_paper(case):
    arrays = golden(case)
    # Ragged groups: rows with the tokens of their whole group instead of a [B, G, T] layout.
    row_tokens = arrays["mask"].sum(dim=-1)
    same_group = arrays["group_index"].unsqueeze(0) == arrays["group_index"].unsqueeze(1)
    group_tokens = (same_group * row_tokens).sum(dim=-1)
    num_groups = len(arrays["group_index"][row_tokens > 0].unique())
    counts = BatchCounts(int(row_tokens.sum()), int((row_tokens > 0).sum()), num_groups)
    log_prob = arrays["logp"].requires_grad_()
    loss = clipped_policy_objective(
        log_prob,
        arrays["old_logp"],
        arrays["adv_seq"],
        arrays["mask"],
        aggregation="group_token_mean",
        group_num_tokens=group_tokens,
        counts=counts,
    )["loss"]
    loss.backward()
    name = "own/agg/group_token_mean"
    torch.testing.assert_close(loss, arrays[f"{name}/loss_group"].to(loss.dtype), **tolerance(case, **ROUNDING))
    torch.testing.assert_close(
        grad_of(log_prob), arrays[f"{name}/grad_group"].to(loss.dtype), **tolerance(case, **ROUNDING)
    )


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_micro_batches_add_up_to_the_published_total(case):
    arrays = golden(case)
    counts = BatchCounts.from_mask(arrays["mask"])
    half = len(arrays["mask"]) // 2
    inputs = [arrays[name] for name in ("logp", "old_logp", "adv_seq", "mask")]
    parts = [
        clipped_policy_objective(*(x[rows] for x in inputs), counts=counts)["loss"]
        for rows in (slice(0, half), slice(half, None))
    ]
    torch.testing.assert_close(
        torch.stack(parts), arrays["own/agg/microbatch/parts"].to(parts[0].dtype), **tolerance(case)
    )
    torch.testing.assert_close(
        sum(parts), arrays["own/agg/microbatch/total"].to(parts[0].dtype), **tolerance(case, **ROUNDING)
    )
    assert abs(sum(parts) - arrays["own/agg/microbatch/mean_of_means"].item()) > 1e-3


def random_batch(seed=0, shape: tuple[int, ...] = (3, 4, 6)) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    batch = {
        name: old + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name in ("log_prob", "ref_log_prob", "rollout_log_prob")
    }
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[0, 1] = False
    mask[-1, :, 0] = True
    entropy = torch.rand(shape, generator=generator, dtype=torch.float64)
    advantage = torch.randn(shape[:-1], generator=generator, dtype=torch.float64)
    return {**batch, "old_log_prob": old, "mask": mask, "entropy": entropy, "advantage": advantage}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_agrees_with_the_loop(mode, estimator):
    batch = random_batch()
    for name in ("log_prob", "entropy"):
        batch[name].requires_grad_()
    correction = {"level": "sequence", "mode": "truncate", "upper": 1.1}
    length_scale = 10 if mode == "seq_mean_token_sum_norm" else None
    counts = BatchCounts.from_mask(batch["mask"], world_size=3)
    out = clipped_policy_objective(
        **batch,
        counts=counts,
        clip_eps_low=0.1,
        clip_eps_high=0.15,
        dual_clip=1.5,
        aggregation=mode,
        length_scale=length_scale,
        kl_coef=0.3,
        kl_estimator=estimator,
        entropy_coef=0.2,
        rollout_correction=correction,
    )
    policy_loss, kl_loss, bonus, entropy, gradient = expected_terms(batch, mode, length_scale, estimator, correction)
    assert out["policy_loss"].item() == pytest.approx(policy_loss)
    assert out["kl_loss"].item() == pytest.approx(kl_loss)
    assert out["entropy_bonus"].item() == pytest.approx(bonus)
    assert out["entropy"].item() == pytest.approx(entropy)
    assert out["loss"].item() == pytest.approx(3 * (policy_loss + 0.3 * kl_loss - 0.2 * bonus))
    out["loss"].backward()
    entropy_gradient = torch.as_tensor(-3 * 0.2 * loss_weights(batch["mask"], mode, length_scale=length_scale))
    torch.testing.assert_close(batch["entropy"].grad, entropy_gradient)
    torch.testing.assert_close(batch["log_prob"].grad, 3 * gradient)


def expected_terms(batch, mode, length_scale, estimator, correction):
    weights = loss_weights(batch["mask"], mode, length_scale=length_scale)
    gradient = torch.zeros_like(batch["log_prob"])
    policy_loss = kl_loss = bonus = entropy = 0.0
    for b in range(batch["mask"].shape[0]):
        rows = [batch[name][b].tolist() for name in ("old_log_prob", "rollout_log_prob", "mask")]
        correction_rows = correction_weights(*rows, **correction)
        for g in range(batch["mask"].shape[1]):
            for t in range(batch["mask"].shape[2]):
                if not batch["mask"][b, g, t]:
                    continue
                w, c = weights[b, g, t], correction_rows[g][t]
                now, old, ref = (batch[f"{name}log_prob"][b, g, t].item() for name in ("", "old_", "ref_"))
                a = batch["advantage"][b, g].item()
                policy_loss += w * c * clipped_loss(now - old, a, 0.1, 0.15, 1.5)
                kl_loss += w * kl_value(now, ref, estimator)
                bonus += w * batch["entropy"][b, g, t].item()
                entropy += batch["entropy"][b, g, t].item() / batch["mask"].sum().item()
                k1 = now - ref
                slope = {"k1": 1.0, "k2": k1, "k3": 1 - math.exp(-k1), "abs": math.copysign(1.0, k1)}[estimator]
                gradient[b, g, t] = w * (c * clipped_gradient(now - old, a, 0.1, 0.15, 1.5) + 0.3 * slope)
    return policy_loss, kl_loss, bonus, entropy, gradient


def test_terms_without_a_coefficient_are_measured_but_not_learned():
    batch = random_batch()
    batch["entropy"].requires_grad_()
    batch["log_prob"].requires_grad_()
    out = clipped_policy_objective(**batch)
    assert out["loss"].item() == out["policy_loss"].item()
    assert out["kl_loss"] > 0
    assert out["entropy"] > 0
    assert "rollout_mismatch_mean" in out
    assert "correction_weight_mean" not in out
    out["loss"].backward()
    assert batch["entropy"].grad is None
    bare = {name: batch[name].detach() for name in ("log_prob", "old_log_prob", "advantage", "mask")}
    bare["log_prob"].requires_grad_()
    alone = clipped_policy_objective(**bare)
    assert alone["loss"].item() == out["loss"].item()
    assert not {"kl_loss", "entropy", "entropy_bonus", "rollout_mismatch_mean"} & set(alone)
    gradient = grad_of(batch["log_prob"]).clone()
    alone["loss"].backward()
    torch.testing.assert_close(bare["log_prob"].grad, gradient, rtol=0.0, atol=0.0)


def test_only_the_loss_carries_a_graph_and_the_world_size():
    batch = random_batch()
    batch["log_prob"].requires_grad_()
    arguments = {"kl_coef": 0.1, "entropy_coef": 0.1, "rollout_correction": {}, "dual_clip": 2.0}
    one, four = (
        clipped_policy_objective(
            **batch, **arguments, counts=BatchCounts.from_mask(batch["mask"], world_size=world_size)
        )
        for world_size in (1, 4)
    )
    for name, value in one.items():
        assert value.requires_grad is (name == "loss")
        assert value.shape == ()
        torch.testing.assert_close(four[name], value * (4 if name == "loss" else 1))
        assert value != 0.0 or name == "clip_ratio_dual_mean"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_masked_positions_change_nothing(aggregation, bad):
    arguments: dict[str, Any] = {
        "aggregation": aggregation,
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "rollout_correction": {},
    }
    arguments["length_scale"] = 9 if aggregation == "seq_mean_token_sum_norm" else None
    results = []
    for filler in (0.0, bad):
        batch = random_batch()
        mask = batch["mask"]
        batch["advantage"] = batch["advantage"].unsqueeze(-1).expand_as(mask)
        batch = {name: x if name == "mask" else torch.where(mask, x, filler) for name, x in batch.items()}
        batch["log_prob"].requires_grad_()
        batch["entropy"].requires_grad_()
        out = clipped_policy_objective(**batch, **arguments)
        out["loss"].backward()
        results.append((out, batch["log_prob"].grad, batch["entropy"].grad))
    for clean, dirty in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(dirty, clean, rtol=0.0, atol=0.0)
    assert results[0][1].abs().sum() > 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_counted_gives_zero_with_a_graph(aggregation):
    batch = random_batch()
    for name in set(batch) - {"mask"}:
        batch[name] = torch.full_like(batch[name], NAN)
    batch["mask"] = torch.zeros_like(batch["mask"])
    batch["log_prob"].requires_grad_()
    out = clipped_policy_objective(
        **batch,
        aggregation=aggregation,
        length_scale=9 if aggregation == "seq_mean_token_sum_norm" else None,
        kl_coef=0.1,
        entropy_coef=0.1,
        rollout_correction={"level": "geometric"},
    )
    assert {name: value.item() for name, value in out.items()} == dict.fromkeys(out, 0.0)
    out["loss"].backward()
    assert grad_of(batch["log_prob"]).abs().max() == 0.0


def test_gradcheck():
    batch = random_batch(shape=(2, 2, 3))
    log_prob = batch.pop("log_prob").requires_grad_()
    entropy = batch.pop("entropy").requires_grad_()
    arguments = {"kl_coef": 0.2, "kl_estimator": "k3", "entropy_coef": 0.1, "rollout_correction": {"upper": 1.1}}

    def loss(x, h):
        return clipped_policy_objective(log_prob=x, entropy=h, **batch, **arguments)["loss"]

    assert torch.autograd.gradcheck(loss, (log_prob, entropy))


def test_flat_tokens_and_half_precision():
    log_prob = torch.tensor([0.25, -0.5], dtype=torch.bfloat16, requires_grad=True)
    out = clipped_policy_objective(
        log_prob,
        torch.zeros(2, dtype=torch.bfloat16),
        torch.tensor([1.0, 1.0], dtype=torch.bfloat16),
        torch.tensor([True, True]),
        entropy=torch.ones(2, dtype=torch.bfloat16),
        entropy_coef=0.5,
    )
    assert {value.dtype for value in out.values()} == {torch.float32}
    torch.testing.assert_close(out["loss"], torch.tensor(-(1.28 + math.exp(-0.5)) / 2 - 0.5))
    assert log_prob.grad is None
    out["loss"].backward()
    assert grad_of(log_prob).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kl_coef": 0.1}, "kl_coef=0.1 needs ref_log_prob"),
        ({"entropy_coef": 0.1}, "entropy_coef=0.1 needs entropy"),
        ({"rollout_correction": {}}, "rollout_correction needs rollout_log_prob"),
    ],
)
def test_a_term_without_its_input_is_refused(arguments, message):
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=message):
        clipped_policy_objective(x, x, torch.zeros(1), torch.ones(1, 2, dtype=torch.bool), **arguments)


def test_regularizers_share_the_weights_of_the_policy_term():
    # Rows of 1 and 3 tokens: as sequence means both rows weigh 1/2, as token mean 1/4 and 3/4.
    mask = torch.tensor([[True, False, False], [True, True, True]])
    per_row = torch.tensor([[8.0], [4.0]]).expand(2, 3)
    out = regularized_objective(
        per_row, mask, kl=per_row, entropy=per_row, kl_coef=1.0, entropy_coef=0.5, aggregation="seq_mean_token_mean"
    )
    expected = {"loss": 9.0, "policy_loss": 6.0, "kl_loss": 6.0, "entropy_bonus": 6.0, "entropy": 5.0}
    assert {name: value.item() for name, value in out.items()} == pytest.approx(expected)


def test_compiles_without_graph_breaks():
    batch = random_batch()
    batch["log_prob"].requires_grad_()
    counts = BatchCounts.from_mask(batch["mask"], world_size=2)

    def loss(log_prob, num_tokens):
        inputs = {**batch, "log_prob": log_prob, "counts": BatchCounts(num_tokens, 9, 3, 2)}
        return clipped_policy_objective(**inputs, kl_coef=0.1, entropy_coef=0.1, rollout_correction={})

    eager = loss(batch["log_prob"], counts.num_tokens)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")(batch["log_prob"], counts.num_tokens)
    torch.testing.assert_close(compiled, eager)
