"""The driver of the demo with stand-in programs; ``tests/recipes`` runs the recipe that it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo_components.demo import demo_commands, report, run_demo
from dapo_components.recipe_files import RecipeFileError

SUMMARY = {"accuracy_before": 0.25, "accuracy_after": 0.875, "num_steps": 40, "seconds": 90.4, "seed": 0}
ROWS = [
    {"step": 1, "prompt_id": 7, "prompt": "1+1?", "response": "#3", "accuracy": 0.0},
    {"step": 1, "prompt_id": 7, "prompt": "1+1?", "response": "#4", "accuracy": 0.0},
    {"step": 2, "prompt_id": 9, "prompt": "2+2?", "response": "2+2=4#4", "accuracy": 1.0},
]
# Stand-ins for `dapo` and `tune`: they record how they were called and leave the files that the real ones leave.
STAND_IN = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps([pathlib.Path(__file__).name, *sys.argv[1:]]) + "\\n")
outcome = json.loads((here / "outcomes.json").read_text()).pop(sys.argv[2], {{}})
settings = dict(argument.split("=", 1) for argument in sys.argv if "=" in argument)
if sys.argv[2] == "recipes/dapo_full.py":
    folder = pathlib.Path(settings["output_dir"])
    (folder / "config.json").write_text("{{}}")
    (folder / "run_summary.json").write_text(json.dumps({summary} | outcome.get("summary", {{}})))
    (folder / "rollouts_rank0.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in {rows}))
sys.exit(outcome.get("status", 0))
"""


SAVES_ON_INTERRUPT = """
import json, pathlib, signal, sys, time
if sys.argv[2] == "recipes/dapo_full.py":
    settings = dict(argument.split("=", 1) for argument in sys.argv if "=" in argument)
    folder = pathlib.Path(settings["output_dir"])
    def save(*_):
        time.sleep(0.5)
        (folder / "run_summary.json").write_text(json.dumps({"stop_reason": "interrupted", "num_steps": 3}))
        sys.exit(0)
    signal.signal(signal.SIGINT, save)
    (folder / "config.json").write_text("{}")
    time.sleep(60)
"""
PYTHON = sys.executable


class Programs:
    """What the stand-ins will do and were asked to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("dapo", "tune"):
            program = folder / name
            summary = SUMMARY | {"stop_reason": "finished"}
            program.write_text(STAND_IN.format(python=sys.executable, summary=summary, rows=ROWS))
            program.chmod(0o755)
        self.expect()

    def expect(self, **outcomes: dict) -> None:
        (self.folder / "outcomes.json").write_text(json.dumps(outcomes))

    def calls(self) -> list[list[str]]:
        """Calls since the last time."""
        log = self.folder / "calls.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    stand_ins = Programs(folder)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return stand_ins


def test_commands_pass_folder_and_seed_to_each_other():
    model, warm_up, dapo = (command.arguments for command in demo_commands(Path("out"), seed=3, resume=False))
    assert model == ("dapo", "demo-model", "tiny", "out/initial", "--seed", "3")
    assert warm_up[:3] == ("tune", "run", "full_finetune_single_device")
    assert {"model_dir=out/initial", "output_dir=out/warm_up", "seed=3"} <= set(warm_up)
    assert dapo[:3] == ("tune", "run", "recipes/dapo_full.py")
    assert {"output_dir=out", "checkpointer.checkpoint_dir=out/warm_up/epoch_0", "seed=3"} <= set(dapo)
    assert "resume=true" not in dapo


def test_a_first_run_does_three_things_and_reports(programs, tmp_path, capsys):
    assert run_demo(tmp_path / "demo", seed=0) == 0
    assert [call[:3] for call in programs.calls()] == [
        ["dapo", "demo-model", "tiny"],
        ["tune", "run", "full_finetune_single_device"],
        ["tune", "run", "recipes/dapo_full.py"],
    ]
    output = capsys.readouterr().out
    assert "0.250 before DAPO, 0.875 after" in output
    assert "1+1? #3" in output
    assert "#4 " in output.partition("in the last step")[2]
    assert "make demo SEED=1" in output


def test_a_finished_run_is_shown_again_without_running(programs, tmp_path, capsys):
    run_demo(tmp_path / "demo", seed=0)
    programs.calls()
    capsys.readouterr()
    assert run_demo(tmp_path / "demo", seed=0) == 0
    assert programs.calls() == []
    assert "0.250 before DAPO, 0.875 after" in capsys.readouterr().out


def test_an_interrupted_run_is_continued(programs, tmp_path, capsys):
    programs.expect(**{"recipes/dapo_full.py": {"summary": {"stop_reason": "interrupted", "num_steps": 12}}})
    assert run_demo(tmp_path / "demo", seed=0) == 130
    assert "stopped after 12 steps" in capsys.readouterr().out
    programs.calls()
    programs.expect()
    assert run_demo(tmp_path / "demo", seed=0) == 0
    (call,) = programs.calls()
    assert call[2] == "recipes/dapo_full.py"
    assert "resume=true" in call


def test_ctrl_c_waits_for_the_recipe_to_save(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("dapo", "tune"):
        (programs / name).write_text(f"#!{sys.executable}\n{SAVES_ON_INTERRUPT}")
        (programs / name).chmod(0o755)
    code = "import sys; sys.executable = {!r}; from pathlib import Path; from dapo_components.demo import run_demo; "
    code += "sys.exit(run_demo(Path({!r}), seed=0))"
    code = code.format(str(programs / "python"), str(tmp_path / "demo"))
    # A terminal sends Ctrl-C to every process of the group; so does this.
    driver = subprocess.Popen([PYTHON, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
    wait_for(tmp_path / "demo/config.json")
    os.killpg(driver.pid, signal.SIGINT)
    output, _ = driver.communicate(timeout=60)
    assert "stopped after 3 steps; the same command continues" in output
    assert driver.returncode == 130


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(path)


def test_a_failed_step_is_tried_again_from_its_beginning(programs, tmp_path):
    programs.expect(**{"full_finetune_single_device": {"status": 9}})
    assert run_demo(tmp_path / "demo", seed=0) == 9
    assert len(programs.calls()) == 2
    half_written = tmp_path / "demo/warm_up/half"
    half_written.mkdir(parents=True)
    programs.expect()
    assert run_demo(tmp_path / "demo", seed=0) == 0
    assert [call[2] for call in programs.calls()] == ["full_finetune_single_device", "recipes/dapo_full.py"]
    assert not half_written.exists()


def test_another_seed_moves_the_former_run_aside(programs, tmp_path, capsys):
    for seed in (0, 1, 0, 1):
        assert run_demo(tmp_path / "demo", seed=seed) == 0
    assert {path.name for path in tmp_path.glob("demo*")} == {"demo", "demo-seed0", "demo-seed1", "demo-seed0-2"}
    assert json.loads((tmp_path / "demo/demo.json").read_text())["seed"] == 1
    assert f"moved the demo of seed 0 to {tmp_path / 'demo-seed0'}" in capsys.readouterr().out


def test_a_folder_with_other_content_is_refused(programs, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/thesis.tex").touch()
    with pytest.raises(RecipeFileError, match="not a demo; choose another --output-dir"):
        run_demo(tmp_path / "demo", seed=0)
    assert programs.calls() == []


def test_report_without_rollouts(tmp_path):
    text = report(tmp_path, {"seed": 4, "seconds": {"warm_up": 31.2}}, SUMMARY)
    assert "40 steps of DAPO in 90 s, after a warm-up of 31 s; seed 4" in text
    assert "What it wrote" not in text
