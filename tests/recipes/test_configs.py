"""Every config of ``dapo_full``, without weights: keys, components, settings of the paper, the command line."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dapo_components.data import get_template
from dapo_components.training.config import COMPONENT, ConfigError, build, locate
from tests.recipes.config_files import ABLATION, ALL, CONFIGS, RECIPE, load, meta_model, raw
from tests.recipes.recipe_runs import ROOT


def test_every_documented_config_is_there() -> None:
    assert ABLATION == [
        "ablation/1_naive_grpo",
        "ablation/2_overlong_filtering",
        "ablation/3_clip_higher",
        "ablation/4_soft_overlong",
        "ablation/5_token_level_loss",
        "ablation/6_dynamic_sampling",
    ]
    named = {"qwen2_5_32B_dapo", "qwen2_5_7B_dapo", "qwen2_5_0_5B_single_device", "smollm2_135m_cpu", "tiny_cpu"}
    assert named <= set(ALL)
    # A config that does not give its command is for another recipe.
    others = {path.stem for path in CONFIGS.rglob("*.yaml")} - {name.rsplit("/", 1)[-1] for name in ALL}
    assert {name for name in others if not name.endswith("_sft")} == set()


# ------------------------------------------------------------------------------------------------- keys and components


def components(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, Mapping):
        if COMPONENT in value:
            yield dict(value)
        for child in value.values():
            yield from components(child)


# What the recipe adds to each component's own arguments: positional ones, then named ones.
ADDED: dict[str, tuple[int, tuple[str, ...]]] = {
    "checkpointer": (0, ("checkpoint_files", "output_dir")),
    "dataset": (1, ("max_prompt_length",)),
    "generator": (1, ()),
    "optimizer": (1, ()),
}


@pytest.mark.parametrize("name", ALL)
def test_config_fits_the_recipe(name: str) -> None:
    cfg = load(name)
    checked = 0
    for key, node in {**vars(cfg), "evaluation.dataset": cfg.evaluation and cfg.evaluation.dataset}.items():
        if isinstance(node, dict) and COMPONENT in node:
            count, names = ADDED.get(key.removeprefix("evaluation."), (0, ()))
            given = {argument: value for argument, value in node.items() if argument != COMPONENT}
            # Raises TypeError for an argument too many or too few.
            inspect.signature(locate(node[COMPONENT])).bind(*[None] * count, **{**dict.fromkeys(names), **given})
            checked += 1
    assert checked >= 8
    for node in (cfg.reward, cfg.advantage, cfg.loss, cfg.soft_overlong, cfg.dynamic_sampling.filter):
        build(node)  # values in range
    build(cfg.optimizer, [nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("name", ALL)
def test_keys_come_in_the_order_of_the_schema(name: str) -> None:
    order = [field.name for field in dataclasses.fields(RECIPE.DAPOConfig)]
    keys = list(raw(CONFIGS / f"{name}.yaml"))
    assert keys == sorted(keys, key=order.index)
    assert keys[0] == "output_dir"


@pytest.mark.parametrize("name", ALL)
def test_parts_of_a_config_agree(name: str) -> None:
    cfg = load(name)
    model = meta_model(cfg.model)
    assert cfg.max_prompt_length + cfg.max_response_length <= model.max_seq_len
    assert cfg.tokenizer["folder"] == cfg.checkpointer["checkpoint_dir"]
    # The reward reads the answer where the prompt asked for it.
    templates = {node["template"] for node in components(vars(cfg)) if "template" in node}
    assert len({get_template(template).extract for template in templates}) == 1
    if cfg.soft_overlong:
        assert cfg.soft_overlong["max_length"] == cfg.max_response_length
    if cfg.evaluation:
        assert max(cfg.evaluation.pass_at) <= cfg.evaluation.num_samples
        held_out = {key: cfg.evaluation.dataset.get(key) for key in ("source", "split")}
        assert held_out != {key: cfg.dataset.get(key) for key in ("source", "split")}


@pytest.mark.parametrize("name", ALL)
def test_first_lines_give_the_command(name: str) -> None:
    lines = (CONFIGS / f"{name}.yaml").read_text("utf-8").splitlines()
    header = "\n".join(lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))])
    assert lines[0].startswith("# DAPO")
    assert f"recipes/dapo_full.py --config recipes/configs/{name}.yaml" in header
    assert "tune run" in header
    assert "tune download" in header or "dapo demo" in header  # where weights come from


# ------------------------------------------------------------------------------------------------ settings of the paper


def test_settings_of_the_paper() -> None:
    cfg = load("qwen2_5_32B_dapo")
    found = {
        "model": cfg.model[COMPONENT].rsplit(".", 1)[-1],
        "prompts": cfg.prompts_per_step,
        "responses per prompt": cfg.group_size,
        "responses per update": cfg.responses_per_update,
        "epochs": cfg.epochs_per_rollout,
        "response length": cfg.max_response_length,
        "prompt length": (cfg.max_prompt_length, cfg.dataset["on_overlong"]),
        "temperature": cfg.temperature,
        "clip": (cfg.loss["clip_eps_low"], cfg.loss["clip_eps_high"], cfg.loss.get("dual_clip")),
        "loss": (cfg.loss["aggregation"], cfg.loss["entropy_coef"], cfg.kl.coef),
        "scores": (cfg.reward["rewards"]["math"]["correct"], cfg.reward["rewards"]["math"]["incorrect"]),
        "soft overlong": (cfg.soft_overlong["buffer_length"], cfg.soft_overlong["penalty"]),
        "overlong filter": cfg.overlong_filter,
        "filter": (cfg.dynamic_sampling.enabled, cfg.dynamic_sampling.filter["key"]),
        "generation batch": cfg.dynamic_sampling.oversampling * cfg.prompts_per_step,
        "generation batches": cfg.dynamic_sampling.max_gen_batches,
        "surplus": cfg.dynamic_sampling.max_staleness,
        "optimizer": (cfg.optimizer[COMPONENT], cfg.optimizer["lr"], cfg.optimizer["weight_decay"], cfg.max_grad_norm),
        "schedule": (cfg.lr_decay, cfg.warmup_steps),
        "evaluation": (cfg.evaluation.num_samples, cfg.evaluation.temperature, cfg.evaluation.top_p),
    }
    assert found == {
        "model": "qwen2_5_32b_base",
        "prompts": 512,
        "responses per prompt": 16,
        "responses per update": 512,
        "epochs": 1,
        "response length": 16384 + 4096,
        "prompt length": (2048, "truncate"),
        "temperature": 1.0,
        "clip": (0.2, 0.28, None),
        "loss": ("token_mean", 0.0, 0.0),
        "scores": (1.0, -1.0),
        "soft overlong": (4096, 1.0),
        "overlong filter": True,
        "filter": (True, "accuracy"),
        "generation batch": 1536,
        "generation batches": 10,
        "surplus": 0,
        "optimizer": ("torch.optim.AdamW", 1e-6, 0.1, 1.0),
        "schedule": ("constant", 20 * 16),
        "evaluation": (32, 1.0, 0.7),
    }


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return leaf values by dotted key, the defaults of components filled in."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    if COMPONENT in value:
        parameters = inspect.signature(locate(value[COMPONENT])).parameters.values()
        value = {p.name: p.default for p in parameters if p.default is not p.empty} | dict(value)
    dot = f"{prefix}." if prefix else ""
    return {key: leaf for name, child in value.items() for key, leaf in flattened(child, dot + name).items()}


def changes(before: str, after: str) -> dict[str, tuple[Any, Any]]:
    old, new = (flattened(dataclasses.asdict(load(name))) for name in (before, after))
    keys = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    return {key: (old.get(key), new.get(key)) for key in keys if key not in ("output_dir", "metric_logger.log_dir")}


def test_ablation_adds_one_technique_a_row() -> None:
    one, two, three, four, five, six = ABLATION
    first = load(one)
    assert (first.loss["clip_eps_low"], first.loss["clip_eps_high"]) == (0.2, 0.2)
    assert (first.loss["aggregation"], first.soft_overlong) == ("seq_mean_token_mean", None)
    assert changes(one, two) == {"overlong_filter": (False, True)}
    assert changes(two, three) == {"loss.clip_eps_high": (0.2, 0.28)}
    soft = changes(three, four)
    assert {key for key in soft if not key.startswith("soft_overlong")} == set()
    assert (soft["soft_overlong.max_length"], soft["soft_overlong.buffer_length"]) == ((None, 20480), (None, 4096))
    assert changes(four, five) == {"loss.aggregation": ("seq_mean_token_mean", "token_mean")}
    dynamic = changes(five, six)
    assert {key for key in dynamic if not key.startswith("dynamic_sampling.")} == set()
    assert dynamic["dynamic_sampling.enabled"] == (False, True)
    assert changes(six, "qwen2_5_32B_dapo") == {}


# ------------------------------------------------------------------------------------------------------ command line


def run_recipe(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recipes.dapo_full", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_unknown_key_is_refused_with_the_nearest_one() -> None:
    done = run_recipe("--config", "recipes/configs/smollm2_135m_cpu.yaml", "group_sise=4", "loss.clip_eps_hihg=0.3")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "did you mean" in line]
    assert errors == [
        "error: unknown config key 'group_sise'; did you mean 'group_size'?",
        "loss: dapo_components.losses.DAPOLoss has no argument 'clip_eps_hihg'; did you mean 'clip_eps_high'?",
    ]
    assert "Traceback" not in done.stderr


def test_dry_run_prints_arithmetic_and_memory_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run_recipe(
        "--config",
        "recipes/configs/qwen2_5_32B_dapo.yaml",
        "--dry-run",
        f"output_dir={folder}",
        "responses_per_update=1024",
        WORLD_SIZE="16",
    )
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "prompts per step 512 (32 per rank, 16 ranks)" in lines
    assert "responses per step 8,192 (groups of 16)" in lines
    assert "optimizer steps per rollout 8 (1 pass of 8)" in lines
    assert "responses per optimizer step 1,024 (64 per rank)" in lines
    assert "longest sequence 22,528 tokens (prompt 2,048 + response 20,480)" in lines
    assert "parameters 7.63 GiB" in lines
    assert not folder.exists()


def test_wrong_value_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match=r"config key 'kl\.placement' must be one of loss, reward, got 'rewards'"):
        load("smollm2_135m_cpu", kl={"placement": "rewards"})
