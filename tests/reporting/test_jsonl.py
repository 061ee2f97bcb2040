from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from dapo_components.reporting.jsonl import StepFile, read_rows, to_json


def test_numbers_that_json_lacks_become_null_wherever_they_are():
    row = {
        "a": math.nan,
        "b": [math.inf, 1.5],
        "c": {"d": -math.inf},
        "e": torch.tensor(2.5),
        "f": torch.tensor(math.nan),
    }
    assert json.loads(to_json(row)) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "e": 2.5, "f": None}


def test_text_of_any_kind_comes_back(tmp_path):
    text = 'line\nbreak \u2028 "quoted" \\ \x00 \u00e9 \U0001f600 \ud800'
    StepFile(tmp_path / "log.jsonl").append([{"step": 1, "text": text}])
    assert (tmp_path / "log.jsonl").read_bytes().count(b"\n") == 1
    assert list(read_rows(tmp_path / "log.jsonl")) == [{"step": 1, "text": text}]


@pytest.mark.parametrize("half", [b'{"step": 3, "te', b"{", b'{"step": 3}', "é".encode()[:1], b"x" * 200_000])
def test_half_a_last_line_is_ignored_by_the_reader_and_cut_when_reopened(tmp_path, half):
    path = tmp_path / "log.jsonl"
    StepFile(path).append([{"step": 1}, {"step": 2}])
    whole = path.read_bytes()
    path.write_bytes(whole + half)
    assert list(read_rows(path)) == [{"step": 1}, {"step": 2}]
    reopened = StepFile(path)
    assert reopened.num_repaired == len(half)
    assert path.read_bytes() == whole
    reopened.append([{"step": 3}])
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_a_file_of_half_a_line_is_emptied(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"st')
    assert StepFile(path).num_repaired == 4
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(0, []), (1, [1]), (2, [1, 2, 2]), (3, [1, 2, 2, 3]), (9, [1, 2, 2, 3])]
)
def test_rows_of_later_steps_are_dropped(tmp_path, resume_step, kept):
    path = tmp_path / "log.jsonl"
    StepFile(path).append([{"step": step} for step in (1, 2, 2, 3)])
    assert StepFile(path, resume_step=resume_step).num_dropped == 4 - len(kept)
    assert [row["step"] for row in read_rows(path)] == kept


def test_folders_are_made(tmp_path):
    StepFile(tmp_path / "a" / "b" / "log.jsonl").append([{"step": 1}])
    assert len(list(read_rows(tmp_path / "a" / "b" / "log.jsonl"))) == 1


@pytest.mark.parametrize("line", ["not json", "[1]"])
def test_a_malformed_line_is_named(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:2: expected .*JSON object"):
        list(read_rows(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"path must be an existing JSON Lines file, got .*log\.jsonl"):
        read_rows(tmp_path / "log.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_with_the_file(tmp_path):
    path = tmp_path / "log.jsonl"
    file = StepFile(path)
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write .*log\.jsonl: No space left on device"):
        file.append([{"step": 1}])
