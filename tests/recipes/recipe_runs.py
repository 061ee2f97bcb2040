"""Run the recipe on a model and a task small enough for a test."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dapo_components.reporting import read_metrics
from dapo_components.tiny_model import TinyArchitecture, build_tiny
from dapo_components.training.config import parse_config

ROOT = Path(__file__).parents[2]
RECIPE_FILE = ROOT / "recipes" / "dapo_full.py"
ARCHITECTURE = TinyArchitecture(num_layers=2, num_heads=2, embed_dim=32, intermediate_dim=64, max_seq_len=64)


def mentions_a_one(completions, **columns) -> list[float]:
    """A task that a random model masters in a few steps: write the digit 1."""
    return [float("1" in text) for text in completions]


def mentions_a_one_half_of_the_time(completions, **columns) -> list[float]:
    """The same for every second prompt, so that groups of the others are uninformative."""
    return [
        float("1" in text) if "2" in prompt else 0.0
        for text, prompt in zip(completions, columns["prompts"], strict=True)
    ]


def never_right(completions, **columns) -> list[float]:
    return [0.0] * len(completions)


def raises(completions, **columns) -> list[float]:
    return [1 / 0 for _ in completions]


@cache
def recipe_module() -> ModuleType:
    """The recipe, imported by its path: the name ``recipes`` may belong to torchtune's folder."""
    spec = importlib.util.spec_from_file_location("dapo_full_under_test", RECIPE_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_inputs(folder: Path) -> Path:
    """Write a model with random weights and two files of problems; returns the folder."""
    build_tiny(folder / "base", seed=0, architecture=ARCHITECTURE)
    for split, first in (("train", 20), ("test", 60)):
        rows = [{"problem": f"{first + number}+{number}=", "answer": str(first + 2 * number)} for number in range(32)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_values(inputs: Path, output_dir: Path, **overrides: Any) -> dict[str, Any]:
    """A config of the recipe; ``overrides`` replace top-level keys."""
    dataset = {"_component_": "dapo_components.data.PromptDataset", "template": "plain"}
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": 0,
        "num_steps": 2,
        "prompts_per_step": 4,
        "group_size": 4,
        "max_response_length": 8,
        "model": {
            "_component_": "torchtune.models.llama3_2.llama3_2",
            "vocab_size": ARCHITECTURE.vocab_size,
            "num_layers": ARCHITECTURE.num_layers,
            "num_heads": ARCHITECTURE.num_heads,
            "num_kv_heads": ARCHITECTURE.num_heads,
            "embed_dim": ARCHITECTURE.embed_dim,
            "max_seq_len": ARCHITECTURE.max_seq_len,
            "intermediate_dim": ARCHITECTURE.intermediate_dim,
            "rope_base": ARCHITECTURE.rope_base,
            "scale_factor": 1,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(inputs / "base"),
            "model_type": "LLAMA3_2",
        },
        "tokenizer": {"_component_": "dapo_components.data.load_tokenizer", "folder": str(inputs / "base")},
        "dataset": {**dataset, "source": str(inputs / "train.jsonl")},
        "max_prompt_length": 8,
        "reward": {
            "_component_": "dapo_components.rewards.RewardSet",
            "rewards": {"one": "tests.recipes.recipe_runs:mentions_a_one"},
        },
        "dynamic_sampling": {"max_staleness": 1},
        "generator": {"_component_": "dapo_components.generation.CausalLMGenerator", "max_slots": 32},
        "evaluation": {"dataset": {**dataset, "source": str(inputs / "test.jsonl")}, "num_samples": 4, "pass_at": [1]},
        "loss": {
            "_component_": "dapo_components.losses.DAPOLoss",
            "rollout_correction": {"level": "token", "mode": "truncate", "upper": 2.0},
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-3},
        "max_tokens_per_micro_batch": 128,
    }
    return values | overrides


def run(values: dict[str, Any]) -> Any:
    """Set the recipe up, train and clean up; returns it."""
    recipe = make(values)
    recipe.setup()
    try:
        recipe.train()
    finally:
        recipe.cleanup()
    return recipe


def make(values: dict[str, Any]) -> Any:
    """Build the recipe without setting it up."""
    module = recipe_module()
    return module.DAPORecipe(parse_config(values, module.DAPOConfig))


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    return list(read_metrics(output_dir / "metrics.jsonl"))


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two runs that did the same must agree on."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time/") and name != "tokens_per_second"}
        for row in rows
    ]


def summary(output_dir: Path) -> dict[str, Any]:
    return json.loads((output_dir / "run_summary.json").read_text())
