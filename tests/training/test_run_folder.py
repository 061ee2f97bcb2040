"""One folder, one run; on resume the user learns what changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapo_components.training.config import ConfigError
from dapo_components.training.run_folder import open_run_folder, store_config

CONFIG = {"seed": 0, "num_steps": 5, "loss": {"clip_eps_low": 0.2, "keys": [1, 2]}, "resume": False}


def start(folder: Path) -> None:
    assert open_run_folder(folder, resume=False, config=CONFIG) == []
    store_config(folder, CONFIG)


def test_a_new_folder_is_made_and_holds_its_config(tmp_path):
    start(tmp_path / "a" / "run")
    assert json.loads((tmp_path / "a" / "run" / "config.json").read_text()) == CONFIG
    assert [path.name for path in (tmp_path / "a" / "run").iterdir()] == ["config.json"]


def test_a_run_that_never_started_leaves_its_folder_free(tmp_path):
    open_run_folder(tmp_path, resume=False, config=CONFIG)
    assert not (tmp_path / "config.json").exists()
    start(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG


def test_a_folder_with_a_run_is_refused_untouched(tmp_path):
    start(tmp_path)
    with pytest.raises(ConfigError) as caught:
        open_run_folder(tmp_path, resume=False, config={**CONFIG, "seed": 1})
    assert str(caught.value) == (
        f"output_dir={tmp_path} already holds a run; add resume=true to continue it, or choose another output_dir"
    )
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG


def test_resume_says_what_changed_but_not_what_may_change(tmp_path):
    start(tmp_path)
    changed = {"seed": 1, "num_steps": 9, "loss": {"clip_eps_low": 0.2, "keys": [1]}, "resume": True, "new": Path("x")}
    assert open_run_folder(tmp_path, resume=True, config=changed) == [
        "loss.keys: [1, 2] -> [1]",
        "new: None -> x",
        "seed: 0 -> 1",
    ]
    store_config(tmp_path, changed)
    assert open_run_folder(tmp_path, resume=True, config=changed) == []


def test_resume_of_nothing_starts_a_run(tmp_path):
    assert open_run_folder(tmp_path / "run", resume=True, config=CONFIG) == []


def test_a_crash_while_the_config_is_stored_keeps_the_former_one(tmp_path, monkeypatch):
    start(tmp_path)

    def crash(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        store_config(tmp_path, {"seed": 9})
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG


def test_a_damaged_config_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 0, "num_st')
    with pytest.raises(
        ConfigError, match=r"^output_dir=.* cannot be used: .*config\.json is damaged \(.*\); remove it"
    ):
        open_run_folder(tmp_path, resume=True, config=CONFIG)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir=.*file/run cannot be used: .*Not a directory"):
        open_run_folder(tmp_path / "file" / "run", resume=False, config=CONFIG)
