"""DAPOLoss: reads the batch, passes its settings on, and behaves under masks, splits and missing keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dapo_components.functional.objectives import clipped_policy_objective
from dapo_components.functional.reductions import AGGREGATIONS, BatchCounts
from dapo_components.losses import DAPOLoss
from tests.oracles_policy import grad_of

NAN = float("nan")
LOG_PROBS = ("log_prob", "old_log_prob", "ref_log_prob", "rollout_log_prob")


def make_batch(num_groups=2, group_size=3, length=4, seed=0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_groups, group_size, length)
    batch = {name: -2 * torch.rand(shape, generator=generator) for name in LOG_PROBS}
    batch["entropy"] = torch.rand(shape, generator=generator)
    lengths = torch.randint(1, length + 1, shape[:-1], generator=generator)
    batch["loss_mask"] = torch.arange(length) < lengths.unsqueeze(-1)
    batch["advantage"] = torch.randn(shape[:-1], generator=generator)
    return TensorDict(batch, batch_size=shape[:-1])


def test_dapo_by_hand():
    # Ratios 1.5 and 0.5 with advantages 1 and -1: both clipped; ratio 1.5 with -1: not. The masked token is nonsense.
    batch = TensorDict(
        {
            "log_prob": torch.tensor([[[1.5, NAN], [0.5, 1.5]]]).log().requires_grad_(),
            "old_log_prob": torch.tensor([[[0.0, NAN], [0.0, 0.0]]]),
            "advantage": torch.tensor([[1.0, -1.0]]),
            "loss_mask": torch.tensor([[[True, False], [True, True]]]),
        },
        batch_size=[1, 2],
    )
    output = DAPOLoss()(batch)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), torch.tensor((-1.28 + 0.8 + 1.5) / 3))
    torch.testing.assert_close(batch["log_prob"].grad, torch.tensor([[[0.0, 0.0], [0.0, 0.5]]]))
    values, _ = output.metrics()
    assert values["clip_ratio/low_mean"].item() == pytest.approx(1 / 3)
    assert values["clip_ratio/high_mean"].item() == pytest.approx(1 / 3)
    assert values["ratio_mean"].item() == pytest.approx(3.5 / 3)
    assert values["log_ratio_max"].item() == pytest.approx(math.log(2))


def test_the_first_update_has_ratio_one_and_the_reinforce_gradient():
    batch = make_batch()
    batch["log_prob"] = batch["old_log_prob"].clone().requires_grad_()
    output = DAPOLoss()(batch)
    output.loss.backward()
    assert output.log_ratio_max.item() == 0.0
    assert output.ratio_mean.item() == pytest.approx(1.0)
    mask = batch["loss_mask"]
    torch.testing.assert_close(batch["log_prob"].grad, -batch["advantage"].unsqueeze(-1) * mask / mask.sum())


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_eps_low": 0.05},
        {"clip_eps_high": 0.05},
        {"dual_clip": 1.05},
        {"aggregation": "seq_mean_token_mean"},
        {"aggregation": "seq_mean_token_sum"},
        {"aggregation": "seq_mean_token_sum_norm", "length_scale": 7},
        {"aggregation": "group_token_mean"},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_estimator": "k1"},
        {"entropy_coef": 0.1},
        {"rollout_correction": {"level": "geometric", "mode": "mask", "upper": 1.1, "lower": 0.9}},
    ],
)
def test_every_setting_reaches_the_objective(settings):
    batch = make_batch()
    loss = DAPOLoss(**settings)(batch).loss
    names = (*LOG_PROBS, "entropy", "advantage")
    expected = clipped_policy_objective(**{name: batch[name] for name in names}, mask=batch["loss_mask"], **settings)
    torch.testing.assert_close(loss, expected["loss"], rtol=0.0, atol=0.0)
    assert not torch.isclose(loss, DAPOLoss()(batch).loss)


def test_keys_are_arguments():
    batch = make_batch()
    settings: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.1, "rollout_correction": {}}
    expected = DAPOLoss(**settings)(batch).loss
    renamed = TensorDict({("other", name): value for name, value in batch.items()}, batch_size=batch.batch_size)
    keys: dict[str, Any] = {f"{name}_key": ["other", name] for name in (*LOG_PROBS, "entropy", "advantage")}
    keys["mask_key"] = ["other", "loss_mask"]
    torch.testing.assert_close(DAPOLoss(**settings, **keys)(renamed).loss, expected)


@pytest.mark.parametrize(
    ("settings", "key", "writer"),
    [
        ({}, "log_prob", "recipe"),
        ({}, "old_log_prob", "recipe"),
        ({}, "advantage", "advantages"),
        ({}, "loss_mask", "collector, OverlongFilter"),
        ({"kl_coef": 0.1}, "ref_log_prob", "recipe"),
        ({"entropy_coef": 0.1}, "entropy", "recipe"),
        ({"rollout_correction": {}}, "rollout_log_prob", "collector"),
    ],
)
def test_a_missing_key_is_named_with_its_writer(settings, key, writer):
    batch = make_batch().exclude(key)
    with pytest.raises(KeyError, match=f"DAPOLoss needs the key '{key}', which {writer} writes"):
        DAPOLoss(**settings)(batch)


def test_keys_that_no_term_needs_may_be_missing():
    batch = make_batch().select("log_prob", "old_log_prob", "advantage", "loss_mask")
    output = DAPOLoss()(batch)
    assert output.kl_loss is None
    assert output.entropy is None
    assert output.rollout_mismatch_mean is None


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_split_into_rows_adds_up(aggregation):
    batch = make_batch(num_groups=3, group_size=4, length=5)
    batch["log_prob"] = batch["log_prob"].clone().requires_grad_()
    mask = batch["loss_mask"]
    counts = BatchCounts.from_mask(mask)
    batch["group_num_tokens"] = mask.sum(dim=-1).sum(dim=-1, keepdim=True).expand(3, 4)
    loss_fn = DAPOLoss(
        aggregation=aggregation,
        length_scale=7 if aggregation == "seq_mean_token_sum_norm" else None,
        kl_coef=0.1,
        entropy_coef=0.1,
        rollout_correction={"level": "sequence"},
    )
    whole = loss_fn(batch)
    (expected,) = torch.autograd.grad(whole.loss, batch["log_prob"])
    rows = batch.reshape(12)
    totals: dict[str, torch.Tensor] = {}
    for index in ([4], [0, 11], [1, 2, 3, 5, 6, 7, 8], [9, 10]):
        output = loss_fn(rows[index], counts=counts)
        output.loss.backward()
        values, reduced_by_max = output.metrics()
        for name, value in {"loss": output.loss.detach(), **values}.items():
            combine = torch.maximum if name in reduced_by_max else torch.add
            totals[name] = combine(totals[name], value) if name in totals else value
    torch.testing.assert_close(batch["log_prob"].grad, expected)
    torch.testing.assert_close(totals, {"loss": whole.loss.detach(), **whole.metrics()[0]})


def test_the_world_size_scales_the_loss_alone():
    batch = make_batch()
    one = DAPOLoss(kl_coef=0.1)(batch, counts=BatchCounts.from_mask(batch["loss_mask"]))
    two = DAPOLoss(kl_coef=0.1)(batch, counts=BatchCounts.from_mask(batch["loss_mask"], world_size=2))
    torch.testing.assert_close(two.loss, 2 * one.loss)
    torch.testing.assert_close(two.metrics()[0], one.metrics()[0], rtol=0.0, atol=0.0)


def test_a_fully_masked_batch_has_loss_zero_and_zero_gradients():
    batch = make_batch()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    batch["log_prob"] = batch["log_prob"].clone().requires_grad_()
    output = DAPOLoss(kl_coef=0.1, entropy_coef=0.1)(batch)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert grad_of(batch["log_prob"]).abs().max().item() == 0.0


def test_forward_never_waits_for_the_device():
    # A fake tensor has no values: anything that reads one, such as item() or an if on a mask, raises.
    settings: dict[str, Any] = {
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "rollout_correction": {"mode": "mask"},
        "dual_clip": 3.0,
    }
    with FakeTensorMode() as mode:
        batch = TensorDict({name: mode.from_tensor(value) for name, value in make_batch().items()}, batch_size=[2, 3])
        for counts in (None, BatchCounts.from_mask(batch["loss_mask"], world_size=2)):
            output = DAPOLoss(**settings)(batch, counts=counts)
            assert output.metrics()[0]["policy_loss"].shape == ()
        with pytest.raises(DataDependentOutputException):
            output.loss.item()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_eps_low": 1.5}, "clip_eps_low"),
        ({"clip_eps_high": -1.0}, "clip_eps_high"),
        ({"dual_clip": 0.9}, "dual_clip"),
        ({"aggregation": "mean"}, "aggregation must be one of token_mean, .*got 'mean'"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "length_scale must be a positive number"),
        ({"kl_estimator": "k9"}, "KL estimator must be one of"),
        ({"kl_coef": -0.1}, "kl_coef must be at least 0"),
        ({"entropy_coef": NAN}, "entropy_coef must be at least 0 and finite"),
        ({"rollout_correction": {"level": "batch"}}, "level must be one of"),
        ({"rollout_correction": {"cap": 2.0}}, "got cap"),
    ],
)
def test_bad_settings_fail_in_the_constructor(settings, message):
    with pytest.raises(ValueError, match=message):
        DAPOLoss(**settings)


def test_an_integer_mask_is_refused():
    batch = make_batch()
    batch["loss_mask"] = batch["loss_mask"].long()
    with pytest.raises(TypeError, match=r"torch\.bool"):
        DAPOLoss()(batch)
