"""Every config of ``dapo_full``, without weights: batch arithmetic, memory, names and shapes of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf
from torchtune.models.qwen2 import qwen2_hf_to_tune, qwen2_tune_to_hf
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dapo_components.training.batch_arithmetic import BatchArithmetic
from dapo_components.training.config import build
from dapo_components.training.memory import GIB
from tests.recipes.config_files import ALL, QWEN_32B, RECIPE, load, meta_model

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
