from __future__ import annotations

import math

import pytest

from dapo_components.reporting import MetricsLog, read_metrics


def test_one_object_per_step(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log(1, {"loss": 0.5, "grad_norm": math.nan})
    log.log(2, {"loss": 0.25})
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [
        {"step": 1, "loss": 0.5, "grad_norm": None},
        {"step": 2, "loss": 0.25},
    ]


def test_a_resumed_run_overwrites_what_it_repeats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path)
    for step in (1, 2, 3, 4):
        first.log(step, {"run": 1})
    resumed = MetricsLog(path, resume_step=2)  # the checkpoint was taken after step 2
    resumed.log(3, {"run": 2})
    assert [(row["step"], row["run"]) for row in read_metrics(path)] == [(1, 1), (2, 1), (3, 2)]


def test_another_runs_file_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path)  # writes nothing
    MetricsLog(path).log(1, {})
    with pytest.raises(ValueError, match="holds the metrics of another run; give resume_step"):
        MetricsLog(path)


@pytest.mark.parametrize("step", [2, 3])
def test_steps_increase(tmp_path, step):
    log = MetricsLog(tmp_path / "metrics.jsonl", resume_step=2)
    log.log(3, {})
    with pytest.raises(ValueError, match=f"step must be > 3, the last one logged, got {step}"):
        log.log(step, {})


def test_the_first_step_is_one(tmp_path):
    with pytest.raises(ValueError, match="step must be > 0"):
        MetricsLog(tmp_path / "metrics.jsonl").log(0, {})


def test_step_is_no_metric(tmp_path):
    with pytest.raises(ValueError, match="must not have a metric called 'step'"):
        MetricsLog(tmp_path / "metrics.jsonl").log(1, {"step": 1.0})
