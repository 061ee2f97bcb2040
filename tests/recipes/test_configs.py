"""Every config of ``dapo_full``, without weights: keys, components, names and shapes, batch arithmetic, memory."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf
from torchtune.models.qwen2 import qwen2_hf_to_tune, qwen2_tune_to_hf
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dapo_components.data import get_template
from dapo_components.training.batch_arithmetic import BatchArithmetic
from dapo_components.training.config import COMPONENT, ConfigError, build, locate, parse_config
from dapo_components.training.memory import GIB
from tests.recipes.recipe_runs import ROOT, recipe_module

CONFIGS = ROOT / "recipes" / "configs"
RECIPE = recipe_module()


def raw(path: Path) -> dict[str, Any]:
    """Return the config's values, interpolations resolved."""
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def load(name: str, **overrides: Any) -> Any:
    return parse_config({**raw(CONFIGS / f"{name}.yaml"), **overrides}, RECIPE.DAPOConfig)


def meta_model(node: Mapping[str, Any]) -> Any:
    """Build a model without storage, once for all configs that share it."""
    return _meta_model(json.dumps(node))


@functools.cache
def _meta_model(node: str) -> Any:
    with torch.device("meta"):
        return build(json.loads(node))


def is_dapo(path: Path) -> bool:
    """Whether a config is for this recipe; the command in its first lines says so."""
    return f"recipes/dapo_full.py --config {path.relative_to(ROOT)}" in path.read_text("utf-8")


ALL = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml") if is_dapo(path))
ABLATION = [name for name in ALL if name.startswith("ablation/")]
QWEN_32B = ["qwen2_5_32B_dapo", *ABLATION]


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


# ---------------------------------------------------------------------------------------------------- batch arithmetic


@pytest.mark.parametrize("name", QWEN_32B)
@pytest.mark.parametrize(("world_size", "prompts", "responses"), [(8, 64, 64), (16, 32, 32), (32, 16, 16)])
def test_batch_of_the_paper_on_several_ranks(name: str, world_size: int, prompts: int, responses: int) -> None:
    sizes: BatchArithmetic = load(name).sizes(world_size)
    assert sizes.responses_per_step == 8192
    assert sizes.updates_per_rollout == 16
    assert sizes.prompts_per_rank == prompts
    assert sizes.prompts_per_update_and_rank * sizes.group_size == responses
    assert sizes.max_sequence_length == 22528


def test_more_ranks_than_groups_of_an_update_are_refused() -> None:
    with pytest.raises(ValueError, match="32 groups, which 64 ranks cannot share evenly; take a multiple of 1024"):
        load("qwen2_5_32B_dapo").sizes(64)


@pytest.mark.parametrize(
    ("name", "world_size", "updates", "groups"),
    [
        ("qwen2_5_7B_dapo", 8, 4, 4),
        ("qwen2_5_7B_dapo", 32, 4, 1),
        ("qwen2_5_0_5B_single_device", 1, 4, 16),
        ("qwen2_5_0_5B_single_device", 16, 4, 1),
        ("smollm2_135m_cpu", 1, 2, 4),
        ("smollm2_135m_cpu", 2, 2, 2),
    ],
)
def test_batch_on_documented_ranks(name: str, world_size: int, updates: int, groups: int) -> None:
    sizes: BatchArithmetic = load(name).sizes(world_size)
    assert (sizes.updates_per_rollout, sizes.prompts_per_update_and_rank) == (updates, groups)


# ------------------------------------------------------------------------------------------------ dry run and memory


@pytest.mark.parametrize("name", ALL)
def test_describe_builds_on_the_meta_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run must not load weights")

    monkeypatch.setattr(torch, "load", refuse)
    cfg = load(name)
    text = RECIPE.DAPORecipe(cfg).describe()
    print(text)
    assert f"{cfg.prompts_per_step * cfg.group_size:,} (groups of {cfg.group_size})" in text
    # 4 bytes of weight, 4 of gradient, 8 of AdamW state.
    assert f"AdamW state {8 * num_parameters(cfg.model) / GIB:>28.2f} GiB" in text


def num_parameters(model: Mapping[str, Any]) -> int:
    return sum(parameter.numel() for parameter in meta_model(model).parameters())


@pytest.mark.parametrize(
    ("name", "world_size", "parameters", "sampler", "low", "high"),
    [
        # 32,763,876,352 parameters in fp32 are 122.05 GiB; over 16 ranks 7.63.
        ("qwen2_5_32B_dapo", 16, 7.63, 122.05, 150, 190),
        ("qwen2_5_32B_dapo", 32, 3.81, 122.05, 140, 175),
        # 7,615,616,512 parameters: 28.37 GiB; on 80 GB devices, with 17 GiB of keys and values beside it.
        ("qwen2_5_7B_dapo", 8, 3.55, 28.37, 46, 57),
        # 494,032,768 parameters: 1.84 GiB.
        ("qwen2_5_0_5B_single_device", 1, 1.84, 0.0, 9, 20),
        # 134,515,008 parameters: 0.50 GiB.
        ("smollm2_135m_cpu", 1, 0.50, 0.0, 2, 8),
    ],
)
def test_memory_estimate(
    name: str, world_size: int, parameters: float, sampler: float, low: float, high: float
) -> None:
    text = RECIPE.DAPORecipe(load(name), world_size=world_size).describe()
    print(text)
    parts = {}
    for line in text.splitlines():
        if line.endswith("GiB"):
            label, number, _ = line.rsplit(maxsplit=2)
            parts[label.strip()] = float(number)
    total = parts.pop("total per rank, estimated")
    assert parts["parameters"] == parts["gradients"] == parameters
    assert parts["AdamW state"] == pytest.approx(2 * parameters, abs=0.011)
    assert parts.get("sampler's copy", 0.0) == sampler
    assert total == pytest.approx(sum(parts.values()), abs=0.05)
    assert low < total < high


# ------------------------------------------------------------------------------------------- parameter names and shapes


def qwen(hidden: int, layers: int, heads: int, inner: int, *, vocab: int, kv: int, eps: float, length: int) -> Any:
    return Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=length,
        rms_norm_eps=eps,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=hidden < 2560,
    )


# From the config.json of each checkpoint.
ARCHITECTURES: dict[str, Any] = {
    "qwen2_5_32B_dapo": qwen(5120, 64, 40, 27648, vocab=152064, kv=8, eps=1e-5, length=131072),
    "qwen2_5_7B_dapo": qwen(3584, 28, 28, 18944, vocab=152064, kv=4, eps=1e-6, length=131072),
    "qwen2_5_0_5B_single_device": qwen(896, 24, 14, 4864, vocab=151936, kv=2, eps=1e-6, length=32768),
    "smollm2_135m_cpu": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    ),
}


def by_hand(config: Any) -> int:
    """Count parameters layer by layer."""
    head = config.hidden_size // config.num_attention_heads
    kv_width = config.num_key_value_heads * head
    attention = 2 * config.hidden_size**2 + 2 * config.hidden_size * kv_width
    if isinstance(config, Qwen2Config):
        attention += config.hidden_size + 2 * kv_width  # biases of queries, keys and values
    mlp = 3 * config.hidden_size * config.intermediate_size
    layers = config.num_hidden_layers * (attention + mlp + 2 * config.hidden_size)
    embeddings = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    return layers + embeddings + config.hidden_size


def shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


# The configs of the ablation have the 32B model too: test_ablation_adds_one_technique_a_row.
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    config, cfg = ARCHITECTURES[name], load(name)
    is_qwen = isinstance(config, Qwen2Config)
    ours = meta_model(cfg.model)
    with torch.device("meta"):
        theirs = (Qwen2ForCausalLM if is_qwen else LlamaForCausalLM)(config).state_dict()
    if config.tie_word_embeddings:
        del theirs["lm_head.weight"]  # a checkpoint stores a tied head once, as the embedding
    sizes = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "dim": config.hidden_size,
    }
    assert cfg.checkpointer["model_type"] == ("QWEN2" if is_qwen else "LLAMA3_2")
    assert shapes((qwen2_tune_to_hf if is_qwen else tune_to_hf)(ours.state_dict(), **sizes)) == shapes(theirs)
    assert shapes((qwen2_hf_to_tune if is_qwen else hf_to_tune)(theirs, **sizes)) == shapes(ours.state_dict())
    assert num_parameters(cfg.model) == by_hand(config)
    # What no shape shows.
    attention = ours.layers[0].attn
    assert (attention.num_heads, attention.num_kv_heads) == (sizes["num_heads"], sizes["num_kv_heads"])
    assert ours.max_seq_len == config.max_position_embeddings
    assert {module.eps for module in ours.modules() if hasattr(module, "eps")} == {config.rms_norm_eps}
    assert attention.pos_embeddings.base == config.rope_parameters["rope_theta"]


def test_rotary_positions_of_smollm2_are_not_rescaled() -> None:
    model: Any = build(load("smollm2_135m_cpu").model)
    plain = 1.0 / 100_000.0 ** (torch.arange(0, 64, 2).float() / 64)
    torch.testing.assert_close(model.layers[0].attn.pos_embeddings.theta, plain)


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
