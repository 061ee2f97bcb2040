"""The estimate against a count by hand and against what autograd really saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from transformers import LlamaConfig, LlamaForCausalLM

from dapo_components.training.batch_arithmetic import BatchArithmetic
from dapo_components.training.causal_lm import backbone_hidden
from dapo_components.training.memory import GIB, MemoryEstimate, describe_run, estimate_memory

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "max_seq_len": 256,
    "intermediate_dim": 96,
}
EMBEDDING = 97 * 32
# Query and output 32 x 32, key and value 32 x 16; gate, up and down 32 x 96; two norms.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 2 * 32
NUM_PARAMETERS = EMBEDDING + 2 * LAYER + 32


def tiny_llama() -> nn.Module:
    return llama3_2(**SIZES)


def tiny_qwen() -> nn.Module:
    return qwen2(**SIZES)


def tiny_huggingface_llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def on_meta(build=tiny_llama) -> nn.Module:
    with torch.device("meta"):
        return build()


def saved_bytes(model: nn.Module, rows: int, length: int) -> int:
    """Bytes that a real forward pass keeps for the backward pass, apart from the model's own tensors."""
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in owned:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        backbone_hidden(model, torch.zeros(rows, length, dtype=torch.long))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def estimate(build=tiny_llama, **changes: Any) -> dict[str, int]:
    options: dict[str, Any] = {"max_tokens": 240, "max_sequence_length": 60, **changes}
    return estimate_memory(on_meta(build), **options).parts


def test_parameters_gradients_and_optimizer_state_are_exact():
    parts = estimate()
    assert sum(parameter.numel() for parameter in tiny_llama().parameters()) == NUM_PARAMETERS
    assert parts["parameters"] == parts["gradients"] == 4 * NUM_PARAMETERS
    assert parts["AdamW state"] == 8 * NUM_PARAMETERS
    assert estimate(dtype="bf16")["parameters"] == 2 * NUM_PARAMETERS


def test_ranks_share_the_state_and_gather_layers():
    parts = estimate(world_size=4, reference_model=True, generator_copy=True)
    assert parts["parameters"] == parts["reference policy"] == NUM_PARAMETERS
    assert parts["gathered layers"] == 4 * (2 * LAYER + 2 * EMBEDDING)
    assert parts["sampler's copy"] == 4 * NUM_PARAMETERS
    assert not {"gathered layers", "reference policy", "sampler's copy"} & estimate().keys()


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen, tiny_huggingface_llama])
@pytest.mark.parametrize(("rows", "length"), [(4, 60), (1, 200)])
def test_activations_are_near_what_autograd_saves(build, rows, length):
    measured = saved_bytes(build(), rows, length)
    found = estimate(build, max_tokens=rows * length, max_sequence_length=length)["activations"]
    assert found == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("length", [8, 32, 96, 97])
def test_a_sequence_as_long_as_the_model_is_wide_is_no_exception(length):
    """Attention scores are told from activations by their shape, which a width must not imitate."""
    measured = saved_bytes(tiny_llama(), 2, length)
    assert estimate(max_tokens=2 * length, max_sequence_length=length)["activations"] == pytest.approx(
        measured, rel=0.25
    )


def test_activations_grow_with_the_budget_and_shrink_with_precision_and_checkpointing():
    base = estimate()["activations"]
    assert estimate(max_tokens=480)["activations"] == pytest.approx(2 * base, rel=1e-3)
    assert estimate(compute_dtype="bf16")["activations"] == base // 2
    checkpointed = estimate(activation_checkpointing=True)["activations"]
    layer_inputs = 4 * 2 * 240 * 32  # float32, two layers, 240 tokens, 32 wide
    assert checkpointed == pytest.approx(base / 2 + layer_inputs, rel=1e-2)


def test_a_model_with_real_weights_is_refused():
    with pytest.raises(ValueError, match="estimate_memory needs a model on the meta device"):
        estimate_memory(tiny_llama(), max_tokens=8, max_sequence_length=8)


def test_a_sequence_beyond_the_models_limit_is_refused():
    with pytest.raises(ValueError, match=r"max_seq_len=256"):
        estimate(max_sequence_length=300)


def test_describe_adds_up():
    text = MemoryEstimate({"parameters": GIB, "gradients": GIB // 2}).describe()
    assert [line.split() for line in text.splitlines()] == [
        ["parameters", "1.00", "GiB"],
        ["gradients", "0.50", "GiB"],
        ["total", "per", "rank,", "estimated", "1.50", "GiB"],
    ]


def test_a_dry_run_states_batch_parameters_and_memory():
    sizes = BatchArithmetic(
        prompts_per_step=4,
        group_size=2,
        world_size=2,
        max_prompt_length=20,
        max_response_length=40,
        max_tokens_per_micro_batch=240,
    )
    text = describe_run({"_component_": f"{__name__}.tiny_llama"}, sizes, dtype="bf16")
    expected = estimate(world_size=2, generator_copy=True, dtype="bf16")
    assert sizes.describe() in text
    assert f"{NUM_PARAMETERS:,}" in text
    assert MemoryEstimate(expected).describe() in text
