"""Sums and counts, not means of means. What several ranks add up to is in tests/distributed/test_ranks.py."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from dapo_components.training import metrics as module
from dapo_components.training.metrics import MetricSums, Stopwatch, add_rollout_metrics, add_sampler_agreement


class TestMetricSums:
    def test_a_mean_is_over_everything_added(self):
        metrics = MetricSums()
        metrics.mean("reward", torch.tensor([1.0, 3.0, 5.0]))
        metrics.mean("reward", torch.tensor([7.0]))
        assert metrics.reduce() == {"reward": 4.0}  # the mean of means would be 5

    def test_masked_values_are_not_read(self):
        metrics = MetricSums()
        metrics.mean("x", torch.tensor([1.0, math.nan, 5.0]), torch.tensor([True, False, True]))
        assert metrics.reduce() == {"x": 3.0}

    def test_a_mean_over_nothing_is_absent(self):
        metrics = MetricSums()
        metrics.mean("x", torch.tensor([1.0]), torch.tensor([False]))
        metrics.sum("y", 2.0)
        assert metrics.reduce() == {"y": 2.0}
        assert MetricSums().reduce() == {}

    def test_sums_and_maxima(self):
        metrics = MetricSums()
        for value in (1.0, torch.tensor(-5.0), 2):
            metrics.sum("total", value)
            metrics.maximum("largest", value)
        metrics.maximum("negative", -3.0)
        assert metrics.reduce() == {"total": -2.0, "largest": 2.0, "negative": -3.0}

    def test_shares_add_up_unless_they_reduce_by_maximum(self):
        metrics = MetricSums()
        for share, largest in ((0.25, 3.0), (0.5, 2.0)):
            metrics.add_shares({"loss": torch.tensor(share), "ratio_max": torch.tensor(largest)}, {"ratio_max"})
        assert metrics.reduce() == {"loss": 0.75, "ratio_max": 3.0}

    def test_a_long_sum_of_float32_values_stays_exact(self):
        metrics = MetricSums()
        for _ in range(3):
            metrics.mean("x", torch.full((1_000_000,), 0.1))
        assert metrics.reduce()["x"] == pytest.approx(float(torch.tensor(0.1)), abs=1e-12)

    def test_values_with_a_graph_do_not_keep_it(self):
        metrics = MetricSums()
        metrics.mean("x", torch.ones(2, requires_grad=True) * 2)
        assert metrics.reduce() == {"x": 2.0}

    def test_nan_is_reported_not_hidden(self):
        metrics = MetricSums()
        metrics.mean("x", torch.tensor([1.0, math.nan]))
        for value in (1.0, math.nan, 2.0):
            metrics.maximum("y", value)
        found = metrics.reduce()
        assert math.isnan(found["x"])
        assert math.isnan(found["y"])


def test_rollout_metrics():
    batch = TensorDict(
        {
            "reward": torch.tensor([[1.0, -1.0], [1.0, 1.0]]),
            "advantage": torch.tensor([[0.5, -0.5], [0.0, 1.0]]),
            "response_length": torch.tensor([[1, 2], [3, 2]]),
            "truncated": torch.tensor([[False, False], [True, False]]),
            "response_mask": torch.arange(3) < torch.tensor([[1, 2], [3, 2]])[..., None],
        },
        batch_size=[2, 2],
    )
    metrics = MetricSums()
    add_rollout_metrics(metrics, batch)
    assert metrics.reduce() == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": 2**0.5 / 2,  # of (1, -1) with one degree of freedom, and 0
            "advantage_abs_mean": 0.5,
            "completions/mean_length": 2.0,
            "completions/clipped_ratio": 0.25,
            "num_tokens": 8.0,
        }
    )


def test_a_group_of_one_has_standard_deviation_zero():
    values = {"reward": torch.ones(2, 1), "advantage": torch.zeros(2, 1), "truncated": torch.zeros(2, 1).bool()}
    values |= {"response_length": torch.ones(2, 1).long(), "response_mask": torch.ones(2, 1, 1).bool()}
    metrics = MetricSums()
    add_rollout_metrics(metrics, TensorDict(values, batch_size=[2, 1]))
    assert metrics.reduce()["reward_std"] == 0.0


class TestSamplerAgreement:
    @pytest.fixture
    def part(self) -> TensorDict:
        """Differences 0.5, 0.25 and one that does not count in version 7; 1.0 in version 6."""
        values = {
            "old_log_prob": torch.tensor([[-1.0, -2.0, math.nan], [-3.0, -9.0, -9.0]]),
            "rollout_log_prob": torch.tensor([[-1.5, -1.75, 0.0], [-2.0, 0.0, math.nan]]),
            "loss_mask": torch.tensor([[True, True, False], [True, False, False]]),
            "policy_version": torch.tensor([7, 6]),
        }
        return TensorDict(values, batch_size=[2])

    @pytest.mark.parametrize(("version", "mean", "largest"), [(7, 0.375, 0.5), (6, 1.0, 1.0)])
    def test_only_counted_tokens_of_the_current_version_are_compared(self, part, version, mean, largest):
        metrics = MetricSums()
        add_sampler_agreement(metrics, part, version=version)
        assert metrics.reduce() == {"sampling/log_prob_diff_mean": mean, "sampling/log_prob_diff_max": largest}

    def test_micro_batches_add_up(self, part):
        metrics = MetricSums()
        for row in range(2):
            part["policy_version"][row] = 7
            add_sampler_agreement(metrics, part[row : row + 1], version=7)
        assert metrics.reduce() == pytest.approx(
            {"sampling/log_prob_diff_mean": 1.75 / 3, "sampling/log_prob_diff_max": 1.0}
        )

    def test_nothing_to_compare_is_no_number(self, part):
        metrics = MetricSums()
        add_sampler_agreement(metrics, part, version=3)
        assert metrics.reduce() == {}


def test_stopwatch_laps_are_differences(monkeypatch):
    times = iter([10.0, 12.0, 12.5, 20.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    clock = Stopwatch()
    for name in ("time/generate", "time/train", "time/sync"):
        clock.lap(name)
    assert clock.laps == {"time/generate": 2.0, "time/train": 0.5, "time/sync": 7.5}
