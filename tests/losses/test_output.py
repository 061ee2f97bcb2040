"""The output of a loss: names, what is absent, and how metrics combine."""

from __future__ import annotations

import re

import torch

from dapo_components.functional.objectives import clipped_policy_objective
from dapo_components.losses import PolicyLossOutput

X = torch.tensor([[0.5, -0.5]])
MASK = torch.tensor([[True, True]])


def outputs():
    """One call that measures as little as possible, one that measures everything."""
    bare = clipped_policy_objective(X, torch.zeros(1, 2), torch.ones(1), MASK)
    everything = clipped_policy_objective(
        X,
        torch.zeros(1, 2),
        torch.ones(1),
        MASK,
        dual_clip=3.0,
        ref_log_prob=X - 1,
        entropy=X.exp(),
        rollout_log_prob=X / 2,
        rollout_correction={},
    )
    return PolicyLossOutput.from_dict(bare, batch_size=[]), PolicyLossOutput.from_dict(everything, batch_size=[])


def test_every_measurement_has_a_field_and_every_field_a_measurement():
    _, everything = outputs()
    fields = set(PolicyLossOutput.__annotations__)
    assert {name for name, value in everything.items() if value is not None} == fields
    documented = PolicyLossOutput.__doc__ or ""
    assert fields == {name for name in fields if re.search(rf"^ +{name}: ", documented, re.MULTILINE)}


def test_a_metric_that_was_not_measured_is_absent():
    bare, everything = outputs()
    values, reduced_by_max = bare.metrics()
    assert set(values) == {
        "policy_loss",
        "ratio_mean",
        "approx_kl_k1",
        "approx_kl_k3",
        "log_ratio_max",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
    }
    assert reduced_by_max == {"log_ratio_max"}
    assert bare.kl_loss is None
    values, reduced_by_max = everything.metrics()
    assert reduced_by_max == {"log_ratio_max", "rollout_mismatch_max"}
    assert {"clip_ratio/dual_mean", "kl_loss", "entropy", "entropy_bonus", "correction_weight_mean"} <= set(values)
    assert "loss" not in values


def test_metrics_are_plain_detached_scalars():
    log_prob = X.clone().requires_grad_()
    output = PolicyLossOutput.from_dict(
        clipped_policy_objective(log_prob, torch.zeros(1, 2), torch.ones(1), MASK), batch_size=[]
    )
    values, _ = output.metrics()
    assert all(
        type(value) is torch.Tensor and value.shape == () and not value.requires_grad for value in values.values()
    )
    assert output.loss.requires_grad
    torch.testing.assert_close(values["clip_ratio/high_mean"], torch.tensor(0.5))
