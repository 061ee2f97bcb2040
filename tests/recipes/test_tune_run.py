"""The lines that the README tells users to type, exactly as they stand there, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.recipes.recipe_runs import ROOT, config_values, make_inputs, metrics, summary

TUNE = Path(sys.executable).with_name("tune")
RECIPE = "recipes/dapo_full.py"
TINY = "recipes/configs/tiny_cpu.yaml"
SHORT = ("num_steps=2", "prompts_per_step=4", "responses_per_update=16", "evaluation.dataset.num_problems=16")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not TUNE.exists(), reason="torchtune's command is not installed")]


def environment() -> dict[str, str]:
    """What a user's shell has: no PYTHONPATH."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def tune_run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TUNE), "run", *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A randomly initialised model of the size that tiny_cpu.yaml names; it answers wrongly, which is enough here."""
    from dapo_components.tiny_model import build_tiny

    return build_tiny(tmp_path_factory.mktemp("tune_run") / "base", seed=0)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_literal_command_works_from_the_repository_root(base, tmp_path, processes):
    several = ("--nproc_per_node", "2") if processes == 2 else ()
    output_dir = tmp_path / "run"
    # A random model never adds up right, so every group is uninformative: train on them all to reach the updates.
    done = tune_run(
        *several, RECIPE, "--config", TINY, f"output_dir={output_dir}", f"checkpointer.checkpoint_dir={base}", *SHORT,
        "dynamic_sampling.enabled=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert summary(output_dir)["stop_reason"] == "finished"
    assert [row["step"] for row in metrics(output_dir)] == [1, 2, 3, 4]
    assert len(list(output_dir.glob("rollouts_rank*.jsonl"))) == processes
    assert "Traceback" not in done.stderr


@pytest.mark.distributed
def test_two_processes_learn_and_resume(inputs, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(config_values(inputs, tmp_path / "run", num_steps=3, prompts_per_step=8)))
    for extra in ((), ("num_steps=6", "resume=true")):
        done = tune_run("--nproc_per_node", "2", RECIPE, "--config", str(config), *extra)
        assert done.returncode == 0, done.stderr[-3000:]
    facts = summary(tmp_path / "run")
    assert facts["num_steps"] == 6
    assert facts["accuracy_after"] > facts["accuracy_before"] + 0.3
    rows = [row for row in metrics(tmp_path / "run") if "sampling/log_prob_diff_max" in row]
    assert max(row["sampling/log_prob_diff_max"] for row in rows) <= 1e-4


def test_a_copied_recipe_runs_from_an_empty_folder_and_says_how(inputs, tmp_path):
    shutil.copy(ROOT / RECIPE, tmp_path / "my_dapo.py")
    text = (tmp_path / "my_dapo.py").read_text()
    assert "tune run" in text[:600]
    assert "Edit first" in text[:900]
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(plain_config(inputs, tmp_path / "run", num_steps=1)))
    done = tune_run("my_dapo.py", "--config", "my.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert summary(tmp_path / "run")["num_steps"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("num_stesp=3",), r"error: unknown config key 'num_stesp'; did you mean 'num_steps'\?"),
        (("group_size=many",), r"error: config key 'group_size' must be int, got 'many' \(str\)"),
        (("--dry-run", "responses_per_update=100"), r"error: responses_per_update=100 must divide"),
        (
            ("loss.clip_esp_low=0.1",),
            r"error: loss: .*DAPOLoss has no argument 'clip_esp_low'; did you mean 'clip_eps_low'",
        ),
    ],
)
def test_a_users_mistake_is_one_line_without_a_stack_trace(arguments, message, tmp_path):
    done = tune_run(RECIPE, "--config", TINY, f"output_dir={tmp_path / 'run'}", *arguments)
    assert done.returncode == 2
    assert re.search(message, done.stderr), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_ctrl_c_saves_a_checkpoint_and_the_run_goes_on_from_it(inputs, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(plain_config(inputs, tmp_path / "run", num_steps=400)))
    process = start(config)
    wait_for_steps(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    assert "stopping after this step, with a checkpoint" in output
    assert "Traceback" not in output
    facts = summary(tmp_path / "run")
    assert facts["stop_reason"] == "interrupted"
    assert 2 <= facts["num_steps"] < 400
    done = tune_run(RECIPE, "--config", str(config), "resume=true", f"num_steps={facts['num_steps'] + 1}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert summary(tmp_path / "run")["num_steps"] == facts["num_steps"] + 1


def test_kill_9_and_resume_gives_the_run_that_was_never_killed(inputs, tmp_path):
    killed, whole = tmp_path / "killed.yaml", tmp_path / "whole.yaml"
    values = plain_config(inputs, tmp_path / "killed", num_steps=8, save_every=2)
    killed.write_text(yaml.safe_dump(values))
    whole.write_text(yaml.safe_dump({**values, "output_dir": str(tmp_path / "whole")}))
    process = start(killed)
    wait_for_steps(tmp_path / "killed", 3, process)
    process.kill()
    process.communicate(timeout=60)
    assert not (tmp_path / "killed" / "checkpoints" / "step_000008").exists()
    for config, extra in ((killed, ("resume=true",)), (whole, ())):
        done = tune_run(RECIPE, "--config", str(config), *extra)
        assert done.returncode == 0, done.stderr[-3000:]
    model = "checkpoints/step_000008/model/model-00001-of-00001.safetensors"
    assert (tmp_path / "killed" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()
    assert (tmp_path / "killed" / "rollouts_rank0.jsonl").read_text() == (
        tmp_path / "whole" / "rollouts_rank0.jsonl"
    ).read_text()


def plain_config(inputs: Path, output_dir: Path, **overrides: object) -> dict[str, object]:
    """A config whose reward is the package's own: a copied recipe does not see the tests."""
    values = config_values(inputs, output_dir, **overrides)
    values["reward"] = {
        "_component_": "dapo_components.rewards.RewardSet",
        "rewards": {"math": {"_component_": "dapo_components.rewards.MathReward", "template": "plain"}},
    }
    return {**values, "dynamic_sampling": {"enabled": False}}


def start(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(TUNE), "run", RECIPE, "--config", str(config)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(output_dir: Path, num_steps: int, process: subprocess.Popen[str]) -> None:
    """Wait until the run has logged that many optimizer steps."""
    deadline = time.monotonic() + 240
    path = output_dir / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and sum(1 for line in path.read_text().splitlines() if json.loads(line)) >= num_steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {num_steps} steps: {process.communicate(timeout=10)[0] if process.poll() else 'timeout'}")
