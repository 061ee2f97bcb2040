"""``dapo demo``: a small model, a supervised warm-up, DAPO, and what came of it.

The demo has no training code. It runs three commands that it prints, each of which a user can type.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_components.recipe_files import RecipeFileError, recipe_root

STATE_FILE = "demo.json"
SUMMARY_FILE = "run_summary.json"


@dataclass(frozen=True)
class DemoCommand:
    """One step of the demo.

    Args:
        stage: Name under which its time is kept.
        arguments: The command line as a user would type it.
        creates: Folder that a failed attempt leaves half-written, or None if the command can resume.
    """

    stage: str
    arguments: tuple[str, ...]
    creates: Path | None


def demo_commands(folder: Path, *, seed: int, resume: bool) -> list[DemoCommand]:
    """Return the commands of the demo, in order.

    Args:
        folder: Output folder.
        seed: Seed of all three.
        resume: Whether the last one continues a run.

    Example:
        >>> for command in demo_commands(Path("runs/demo"), seed=0, resume=False):
        ...     print(*command.arguments[:3])
        dapo demo-model tiny
        tune run full_finetune_single_device
        tune run recipes/dapo_full.py
    """
    recipe, configs = _recipe_paths()
    initial, warm_up = folder / "initial", folder / "warm_up"
    sft = ("tune", "run", "full_finetune_single_device", "--config", f"{configs}/tiny_cpu_sft.yaml")
    dapo = ("tune", "run", recipe, "--config", f"{configs}/tiny_cpu.yaml")
    own = (f"output_dir={folder}", f"checkpointer.checkpoint_dir={warm_up / 'epoch_0'}", f"seed={seed}")
    return [
        DemoCommand("model", ("dapo", "demo-model", "tiny", str(initial), "--seed", str(seed)), initial),
        DemoCommand("warm_up", (*sft, f"model_dir={initial}", f"output_dir={warm_up}", f"seed={seed}"), warm_up),
        DemoCommand("dapo", (*dapo, *own, *(["resume=true"] if resume else [])), None),
    ]


def run_demo(folder: Path, *, seed: int) -> int:
    """Run the demo, continue it, or show again what it found.

    Args:
        folder: Output folder. A finished run of this seed is shown again, an interrupted one continued, and a run of
            another seed moved aside.
        seed: Seed of weights, data and sampling.

    Returns:
        0, or the exit status of the command that failed.

    Raises:
        ModuleNotFoundError: If the recipes' packages are missing.
        RecipeFileError: If the folder holds something that is not a demo.
    """
    if importlib.util.find_spec("torchtune") is None:
        raise ModuleNotFoundError('the demo needs torchtune; type: pip install "dapo-components[recipes]"')
    checkout = _checkout()
    if checkout and checkout != Path.cwd():
        folder = folder.resolve()
        print(f"cd {checkout}")
    state = _open_folder(folder, seed)
    summary = _read_json(folder / SUMMARY_FILE)
    if summary.get("stop_reason") == "finished":
        print(f"{folder} holds the finished demo of seed {seed}; remove it to run again")
        print(report(folder, state, summary))
        return 0
    for command in demo_commands(folder, seed=seed, resume=(folder / "config.json").exists()):
        if command.stage in state["seconds"]:
            continue
        if command.creates:
            shutil.rmtree(command.creates, ignore_errors=True)
        started = time.perf_counter()
        status = _run(command.arguments, cwd=checkout)
        if status != 0:
            print(f"\nthis command ended with status {status}; `make demo` (or `dapo demo`) tries it again")
            return status
        if command.creates:
            state["seconds"][command.stage] = round(time.perf_counter() - started, 1)
            _write_json(folder / STATE_FILE, state)
    summary = _read_json(folder / SUMMARY_FILE)
    if summary.get("stop_reason") != "finished":
        print(f"\nstopped after {summary.get('num_steps', 0)} steps; the same command continues")
        return 130
    print(report(folder, state, summary))
    return 0


def report(folder: Path, state: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return what a user wants to know at the end.

    Args:
        folder: Output folder.
        state: Content of ``demo.json``.
        summary: Content of ``run_summary.json``.
    """
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    recipe, configs = _recipe_paths()
    again = "make demo SEED=" if _checkout() else "dapo demo --seed "
    lines = [
        "",
        f"Accuracy on held-out problems: {before:.3f} before DAPO, {after:.3f} after",
        f"  {summary['num_steps']} steps of DAPO in {summary['seconds']:.0f} s, after a warm-up of "
        f"{state['seconds']['warm_up']:.0f} s; seed {state['seed']}",
        *_examples(folder / "rollouts_rank0.jsonl"),
        "",
        f"In {folder}:",
        "  run_summary.json       the numbers above",
        "  metrics.jsonl          one object for each optimizer step",
        "  rollouts_rank0.jsonl   every response, with its rewards",
        "  checkpoints/           Hugging Face folders",
        "",
        "Try next:",
        f"  {again}{state['seed'] + 1}",
        f"  tune run {recipe} --config {configs}/tiny_cpu.yaml output_dir=runs/grpo "
        f"checkpointer.checkpoint_dir={folder / 'warm_up/epoch_0'} loss.clip_eps_high=0.2 "
        "loss.aggregation=seq_mean_token_mean dynamic_sampling.enabled=false",
        "  dapo cp dapo_full my_dapo.py",
    ]
    return "\n".join(lines)


def _examples(rollouts: Path, num_examples: int = 3) -> list[str]:
    """A few responses of the first and of the last step, one per prompt."""
    if not rollouts.exists():
        return []
    with open(rollouts, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    lines = []
    for title, step in (("in the first step", rows[0]["step"]), ("in the last step", rows[-1]["step"])):
        firsts = {row["prompt_id"]: row for row in reversed(rows) if row["step"] == step}
        lines += ["", f"What it wrote {title}:"]
        for row in list(firsts.values())[:num_examples]:
            verdict = "right" if row["accuracy"] == 1 else "wrong"
            lines.append(f"  {row['prompt']} {row['response']:<60} {verdict}")
    return lines


def _open_folder(folder: Path, seed: int) -> dict[str, Any]:
    """Return the state of the demo in ``folder``, making room for another seed."""
    state = _read_json(folder / STATE_FILE)
    if folder.exists() and not state and any(folder.iterdir()):
        raise RecipeFileError(f"{folder} holds something that is not a demo; choose another --output-dir")
    if state and state["seed"] != seed:
        aside = folder.with_name(f"{folder.name}-seed{state['seed']}")
        for number in range(2, 1000):
            if not aside.exists():
                break
            aside = folder.with_name(f"{folder.name}-seed{state['seed']}-{number}")
        folder.rename(aside)
        print(f"moved the demo of seed {state['seed']} to {aside}")
        state = {}
    if not state:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"seed": seed, "seconds": {}}
        _write_json(folder / STATE_FILE, state)
    return state


def _run(arguments: Sequence[str], *, cwd: Path | None) -> int:
    """Print a command and run it; its programs are those beside this interpreter."""
    print(f"\n$ {shlex.join(arguments)}", flush=True)
    program = Path(sys.executable).with_name(arguments[0])
    found = str(program) if program.exists() else shutil.which(arguments[0])
    if found is None:
        raise ModuleNotFoundError(f"the program {arguments[0]!r} is not installed; type: dapo doctor")
    process = subprocess.Popen([found, *arguments[1:]], cwd=cwd, env=_environment())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the terminal sent it to the command too, which saves a checkpoint


def _environment() -> dict[str, str]:
    """What the demo's commands run under: the user's own variables, which win, and what suits a small CPU machine."""
    # torchdata calls a deprecated function of torch at every start; that is no news for whoever runs a demo.
    quiet = "ignore::UserWarning:torchdata.stateful_dataloader.stateful_dataloader"
    warnings = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), quiet]))
    # Threads that wait by spinning ruin each other where the cores are shared; large pages save page faults on Linux.
    suited = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
    return {**suited, **os.environ, "PYTHONWARNINGS": warnings}


def _checkout() -> Path | None:
    """Root of the repository, or None if the package is installed as a wheel."""
    root = recipe_root()
    return root.parent if root.name == "recipes" else None


def _recipe_paths() -> tuple[str, str]:
    """The recipe as ``tune run`` takes it, and the folder of the configs."""
    if _checkout():
        return "recipes/dapo_full.py", "recipes/configs"
    # A path that `tune run` turns into the name of an installed module, from any working directory.
    return "dapo_components/_recipes/dapo_full.py", str(recipe_root() / "configs")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
