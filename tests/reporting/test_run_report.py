import json
from functools import partial

import pytest

from dapo_components.reporting import RunReport, read_metrics, read_rollouts

ROLLOUT = {"reward": 0.5, "completions/mean_length": 12.0, "tokens_per_second": 100.0}
ROW = {
    "prompt_id": 0,
    "group_id": 0,
    "sample_id": 0,
    "prompt": "p",
    "response": "r",
    "answer": "a",
    "rewards": {},
    "reward": 1.0,
    "accuracy": 1.0,
    "response_length": 1,
    "truncated": False,
    "kept": True,
    "policy_version": 0,
}


class SpyLogger:
    def __init__(self):
        self.rows, self.closed = [], False

    def log_dict(self, payload, step):
        self.rows.append((step, dict(payload)))

    def close(self):
        self.closed = True


def summary(folder):
    return json.loads((folder / "run_summary.json").read_text())


def test_a_second_run_is_kept_out_until_the_first_has_ended(tmp_path):
    open_report = partial(RunReport, tmp_path, step=0, num_steps=1, num_updates=0)
    first = open_report()
    first.step_done([{"loss": 1.0}], ROLLOUT, num_updates=1)
    with pytest.raises(ValueError, match=r"output_dir=.* is in use by another run"):
        open_report()
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 1
    open_report(rank=1)
    first.close(evaluations={})
    open_report()


def test_one_row_per_optimizer_step_with_the_rollouts_numbers_in_each(tmp_path):
    logger = SpyLogger()
    report = RunReport(tmp_path, step=0, num_steps=2, num_updates=0, metric_logger=logger)
    report.step_done([{"loss": 1.0}, {"loss": 2.0}], ROLLOUT, num_updates=2)
    report.step_done([{"loss": 3.0}], ROLLOUT, num_updates=3)
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["rollout_step"], row["loss"]) for row in rows] == [(1, 1, 1.0), (2, 1, 2.0), (3, 2, 3.0)]
    assert all(row["reward"] == 0.5 for row in rows)
    assert [(step, row["loss"]) for step, row in logger.rows] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_resuming_drops_what_will_be_repeated(tmp_path):
    report = RunReport(tmp_path, step=0, num_steps=3, num_updates=0)
    for number in (1, 2, 3):
        report.rollouts([ROW])
        report.step_done([{"loss": float(number)}], ROLLOUT, num_updates=number)
    report.close(evaluations={})
    again = RunReport(tmp_path, step=1, num_steps=3, num_updates=1)
    again.rollouts([{**ROW, "response": "second try"}])
    again.step_done([{"loss": 20.0}], ROLLOUT, num_updates=2)
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 20.0]
    assert [(row["step"], row["response"]) for row in read_rollouts(tmp_path / "rollouts_rank0.jsonl")] == [
        (1, "r"),
        (2, "second try"),
    ]


@pytest.mark.parametrize(
    ("evaluations", "before", "after"),
    [
        ({}, None, None),
        ({0: {"mean@4": 0.25, "mean@4_stderr": 0.9}}, 0.25, None),
        ({0: {"mean@4": 0.25}, 10: {"mean@4": 0.5}, 2: {"mean@4": 0.75}}, 0.25, 0.5),
        ({10: {"mean@4": 0.5}}, None, 0.5),
    ],
)
def test_accuracy_before_and_after_are_measured_or_null(tmp_path, evaluations, before, after):
    report = RunReport(tmp_path, step=0, num_steps=10, num_updates=0)
    report.close(evaluations=evaluations, stop_reason="interrupted", seed=3)
    facts = summary(tmp_path)
    assert (facts["accuracy_before"], facts["accuracy_after"]) == (before, after)
    assert (facts["stop_reason"], facts["seed"], facts["num_steps"]) == ("interrupted", 3, 0)


def test_other_ranks_write_their_rollouts_and_nothing_else(tmp_path):
    report = RunReport(tmp_path, step=0, num_steps=1, num_updates=0, rank=1)
    report.rollouts([ROW])
    report.step_done([{"loss": 1.0}], ROLLOUT, num_updates=1)
    report.evaluation({"mean@4": 0.5})
    report.close(evaluations={}, stop_reason="finished")
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts_rank1.jsonl"]


def test_evaluations_are_shown_and_logged_and_the_logger_is_closed(tmp_path, capsys):
    logger = SpyLogger()
    report = RunReport(tmp_path, step=4, num_steps=9, num_updates=8, metric_logger=logger)
    report.evaluation({"mean@4": 0.5, "mean@4_stderr": 0.1})
    assert "held-out accuracy after 4 steps: mean@4 0.500" in capsys.readouterr().out
    assert logger.rows == [(4, {"evaluation/mean@4": 0.5, "evaluation/mean@4_stderr": 0.1})]
    report.close(evaluations={}, stop_reason="finished")
    assert logger.closed


def test_rollouts_can_be_switched_off_or_limited(tmp_path):
    RunReport(tmp_path / "off", step=0, num_steps=1, num_updates=0, log_rollouts=False).rollouts([ROW])
    assert not (tmp_path / "off" / "rollouts_rank0.jsonl").exists()
    report = RunReport(tmp_path / "few", step=0, num_steps=1, num_updates=0, max_logged_rollouts=2)
    for _ in range(3):
        report.rollouts([ROW, ROW])
    assert len(list(read_rollouts(tmp_path / "few" / "rollouts_rank0.jsonl"))) == 2
