from __future__ import annotations

import math

import pytest

from dapo_components.reporting import ROLLOUT_FIELDS, RolloutLog, read_rollouts


def row(sample_id=0, **changes):
    return {
        "prompt_id": 3,
        "group_id": 5,
        "sample_id": sample_id,
        "prompt": "1+1=",
        "response": "2\n",
        "answer": "2",
        "rewards": {"math": 1.0, "style": math.nan},
        "reward": 1.0,
        "accuracy": 1.0,
        "response_length": 2,
        "truncated": False,
        "kept": True,
        "policy_version": 7,
        **changes,
    }


def test_rows_come_back_with_their_step(tmp_path):
    log = RolloutLog(tmp_path / "rollouts.jsonl")
    log.write([row(0), row(1, filter_reason="accuracy all 1")], step=4)
    rows = list(read_rollouts(tmp_path / "rollouts.jsonl"))
    assert rows[0] == {**row(0), "rewards": {"math": 1.0, "style": None}, "step": 4}
    assert rows[1]["filter_reason"] == "accuracy all 1"
    assert set(ROLLOUT_FIELDS) == set(rows[0])


def test_reopening_appends(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    RolloutLog(path).write([row()], step=1)
    path.write_bytes(path.read_bytes() + b'{"step": 2, "resp')
    RolloutLog(path).write([row()], step=2)
    assert [r["step"] for r in read_rollouts(path)] == [1, 2]


def test_a_resumed_run_drops_what_it_repeats(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    log = RolloutLog(path)
    for step in (1, 2, 3):
        log.write([row(), row(1)], step=step)
    RolloutLog(path, resume_step=1).write([row()], step=2)
    assert [r["step"] for r in read_rollouts(path)] == [1, 1, 2]


def test_the_limit_per_step_keeps_groups_whole(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    log = RolloutLog(path, max_per_step=3)
    for step in (1, 2):
        for group in range(3):
            log.write([row(sample, group_id=group) for sample in range(2)], step=step)
    assert [(r["step"], r["group_id"]) for r in read_rollouts(path)] == [
        (1, 0), (1, 0), (1, 1), (1, 1), (2, 0), (2, 0), (2, 1), (2, 1),
    ]  # fmt: skip
    assert log.num_skipped == 4


def test_a_missing_field_is_named(tmp_path):
    incomplete = row()
    del incomplete["accuracy"]
    with pytest.raises(ValueError, match=r"got one without \['accuracy'\]"):
        RolloutLog(tmp_path / "rollouts.jsonl").write([incomplete], step=1)


def test_the_limit_is_positive(tmp_path):
    with pytest.raises(ValueError, match="max_per_step must be >= 1 or null, got 0"):
        RolloutLog(tmp_path / "rollouts.jsonl", max_per_step=0)
