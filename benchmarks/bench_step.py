"""A whole training step: our recipe beside TRL's ``GRPOTrainer``, back to back, same work, same settings.

    THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.bench_step tiny
    THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.bench_step smollm2 --model models/smollm2-135m --json smollm2.json

8 prompts of 45 tokens, 8 samples each, 24 new tokens, temperature 1, float32, one AdamW step on the 64 responses, loss
of DAPO without a KL term, no dynamic sampling (TRL has none). EOS is a token that the model does not have, so no
response ends early. A micro-batch holds the same number of responses on both sides. Each side runs in a process of its
own, in turn, ``--rounds`` times. A step includes sampling, scoring, training, data loading and logging, no checkpoint.

TRL runs where ``trl`` can be imported: here, or in another environment's interpreter given by ``--trl-python``. The
variables of the environment (``THP_MEM_ALLOC_ENABLE``) are the same for both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step_work import Work

ROOT = Path(__file__).parents[1]
NEVER = "<|never|>"
WORDS = (
    "a the of to in is on at by cat dog tree house river stone green small seven bright walks opens finds under".split()
)
Run = dict[str, Any]


def build_model(folder: Path, source: Path | None) -> Path:
    """Copy a model folder, or build a tiny one, and give it an EOS that the model cannot produce."""
    from transformers import AutoTokenizer

    from dapo_components.tiny_model import TinyArchitecture, build_tiny

    if source is None:
        sizes = TinyArchitecture(num_layers=2, num_heads=4, embed_dim=128, intermediate_dim=384, max_seq_len=256)
        build_tiny(folder, seed=0, architecture=sizes)
    else:
        shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": NEVER})
    (folder / "special_tokens_map.json").unlink(missing_ok=True)  # would override what is saved now
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text("utf-8"))
        values["eos_token_id"] = tokenizer.eos_token_id
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
        if tokenizer.eos_token_id < values.get("vocab_size", 0):
            raise ValueError(f"{source}: the model has spare ids beyond its tokenizer's, so it may sample {NEVER}")
    return folder


def write_prompts(path: Path, model: Path, *, count: int, length: int) -> Path:
    """Write ``count`` texts of exactly ``length`` tokens."""
    from transformers import AutoTokenizer

    tokenizer, rng, texts = AutoTokenizer.from_pretrained(model), random.Random(0), []
    while len(texts) < count:
        words, num_tokens = [], 0
        while num_tokens < length:
            words.append(rng.choice(WORDS))
            num_tokens = len(tokenizer(" ".join(words))["input_ids"])
        if num_tokens == length:
            texts.append(" ".join(words))
    path.write_text("".join(json.dumps({"problem": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run_side(side: str, python: str, work: Work, folder: Path, *, threads: int) -> Run:
    """Run a side in a fresh process and return what it measured."""
    folder.mkdir(parents=True)
    work.write(folder / "work.json")
    command = [python, "-m", f"benchmarks.step_{side}", str(folder / "work.json"), str(folder / "result.json")]
    fixed = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    load = os.getloadavg()[0]
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | fixed, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{side} ended with status {done.returncode}:\n" + (folder / "log.txt").read_text()[-3000:])
    result = json.loads((folder / "result.json").read_text("utf-8"))
    if set(result["lengths"]) != {float(work.response_length)} or result["threads"] != threads:
        raise RuntimeError(f"{side} did other work: mean lengths {result['lengths']}, {result['threads']} threads")
    return {**result, "load_before": load}


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the sides in turn."""
    num_steps = arguments.warm_up + arguments.steps
    model = build_model(folder / "model", arguments.model)
    common: dict[str, Any] = {
        "model": str(model),
        "num_steps": num_steps,
        "response_length": arguments.response_length,
        "responses_per_micro_batch": arguments.responses_per_micro_batch,
        "activation_checkpointing": arguments.activation_checkpointing,
        "prompts_file": str(folder / "prompts.jsonl"),
    }
    write_prompts(folder / "prompts.jsonl", model, count=Work.num_prompts * num_steps, length=Work.prompt_length)
    pythons = {"ours": sys.executable, "trl": trl_python(arguments.trl_python)}
    runs: dict[str, list[Run]] = {side: [] for side, python in pythons.items() if python}
    for number in range(arguments.rounds):
        for side, side_runs in runs.items():
            work = Work(output_dir=str(folder / f"{side}{number}" / "run"), **common)
            run = run_side(side, str(pythons[side]), work, folder / f"{side}{number}", threads=arguments.threads)
            side_runs.append(run)
            print(f"round {number + 1}, {describe(side, summary([run], arguments.warm_up))}", flush=True)
    return {
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()},
        "large_pages": os.environ.get("THP_MEM_ALLOC_ENABLE"),
        "runs": runs,
        "summary": {side: summary(side_runs, arguments.warm_up) for side, side_runs in runs.items()},
    }


def summary(runs: list[Run], warm_up: int) -> dict[str, float]:
    """Medians over the measured steps of all runs, in seconds and MiB."""
    result = {
        name: statistics.median(value for run in runs for value in run[name][warm_up:])
        for name in ("wall", "processor", "generate")
    }
    result["peak_mib"] = statistics.median(run["peak_mib"] for run in runs)
    result["entropy"] = statistics.mean(run["entropy"] for run in runs)
    result["load_max"] = max(max(run["load"], run["load_before"]) for run in runs)
    return result


def describe(side: str, values: dict[str, float]) -> str:
    return (
        f"{side:4}: step {values['wall']:.4g} s (sampling {values['generate']:.4g} s), processor time "
        f"{values['processor']:.4g} s, peak {values['peak_mib']:.0f} MiB, entropy of step 1 {values['entropy']:.3f}, "
        f"load average up to {values['load_max']:.1f}"
    )


def report(result: dict[str, Any]) -> None:
    for side, values in result["summary"].items():
        print(f"median, {describe(side, values)}")
    if "trl" not in result["summary"]:
        print("TRL is not installed here; name an interpreter that has it with --trl-python")
        return
    ours, trl = result["summary"]["ours"], result["summary"]["trl"]
    ratios = ", ".join(f"{name} {ours[name] / trl[name]:.2f}" for name in ("wall", "processor", "generate", "peak_mib"))
    print(f"ours / TRL {result['runs']['trl'][0]['versions']['trl']}: {ratios}")


def trl_python(given: str | None) -> str | None:
    """The interpreter that runs TRL's side, or None."""
    return given or (sys.executable if importlib.util.find_spec("trl") else None)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("tiny", "smollm2"))
    parser.add_argument("--model", type=Path, help="folder of a Llama in Hugging Face form; tiny builds its own")
    parser.add_argument("--trl-python", help="interpreter of an environment that has TRL")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side")
    parser.add_argument("--warm-up", type=int, help="first steps of a process, not counted")
    parser.add_argument("--steps", type=int, help="counted steps of a process")
    parser.add_argument("--response-length", type=int, default=Work.response_length)
    parser.add_argument("--responses-per-micro-batch", type=int)
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    arguments = parser.parse_args(argv)
    tiny = arguments.work == "tiny"
    if (arguments.model is None) != tiny:
        parser.error("smollm2 needs --model, tiny takes none")
    defaults = {
        "warm_up": 5 if tiny else 1,
        "steps": 30 if tiny else 2,
        "responses_per_micro_batch": 64 if tiny else 16,
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = compare(arguments, Path(folder))
    report(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


@pytest.mark.benchmark(group="whole steps of a tiny model, process start included")
def test_tiny_step(benchmark: Any) -> None:
    """Three steps of each side that is installed; look at ``extra_info`` for the seconds of a step."""
    arguments = ["tiny", "--rounds", "1", "--warm-up", "1", "--steps", "2", "--response-length", "4", "--threads", "1"]
    result = benchmark.pedantic(main, args=(arguments,), rounds=1)
    benchmark.extra_info.update({side: values["wall"] for side, values in result["summary"].items()})
    assert len(result["runs"]["ours"][0]["wall"]) == 3


if __name__ == "__main__":
    main()
