"""Hugging Face folder in, Hugging Face folder out, and nothing lost on the way. Sharding is in tests/distributed."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dapo_components.training.config import ConfigError
from dapo_components.training.torchtune_state import (
    HFCheckpoints,
    build_model,
    check_weights_match,
    full_state_dict,
    load_optimizer_state,
    optimizer_state,
)
from tests.helpers import plain_logits, tiny_huggingface
from tests.helpers_training import gradients

CPU = torch.device("cpu")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
MODEL: dict[str, Any] = {
    "_component_": "torchtune.models.llama3_2.llama3_2",
    "vocab_size": 13,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 16,
    "max_seq_len": 64,
    "intermediate_dim": 32,
    "rope_base": 10_000,
    "scale_factor": 1,
}


@pytest.fixture(scope="module", autouse=True)
def cheap_collections():
    """torchtune collects garbage at every load; with transformers imported that takes a second, unless frozen."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_huggingface(seed=3).save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    (folder / "tokenizer.json").write_text("{}")
    return folder


def checkpoints(source: Path, scratch: Path, **changes: Any) -> HFCheckpoints:
    node = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(source),
        "model_type": "LLAMA3_2",
        **changes,
    }
    return HFCheckpoints(node, scratch)


def built(weights: dict[str, torch.Tensor], **options: Any) -> nn.Module:
    return build_model(MODEL, weights, device=CPU, dtype=torch.float32, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One update of every weight that depends on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


class TestHFCheckpoints:
    def test_the_model_computes_what_transformers_computes(self, source, tmp_path):
        model = built(checkpoints(source, tmp_path).load())
        expected = plain_logits(tiny_huggingface(seed=3), TOKENS)
        torch.testing.assert_close(plain_logits(model, TOKENS), expected, rtol=0, atol=1e-5)
        assert expected.std() > 0.1

    def test_a_saved_folder_loads_in_transformers_with_equal_logits(self, source, tmp_path):
        files = checkpoints(source, tmp_path / "scratch")
        model = built(files.load())
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
        files.save(full_state_dict(model, CPU), tmp_path / "saved")
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(plain_logits(reloaded, TOKENS), plain_logits(model, TOKENS), rtol=0, atol=1e-5)
        assert json.loads((tmp_path / "saved" / "config.json").read_text())["hidden_size"] == 16
        assert (tmp_path / "saved" / "tokenizer.json").exists()
        assert list((tmp_path / "scratch").iterdir()) == []

    def test_a_saved_folder_is_read_back_exactly(self, source, tmp_path):
        files = checkpoints(source, tmp_path / "scratch")
        model = built(files.load())
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
        files.save(full_state_dict(model, CPU), tmp_path / "saved")
        again = files.load(tmp_path / "saved")
        assert again.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)

    def test_a_resumed_run_saves_whole_folders_after_its_checkpoint_is_gone(self, source, tmp_path):
        files = checkpoints(source, tmp_path / "scratch")
        files.save(files.load(), tmp_path / "first")
        resumed = checkpoints(source, tmp_path / "scratch")
        resumed.load()
        weights = resumed.load(tmp_path / "first")
        shutil.rmtree(tmp_path / "first")  # pruned
        resumed.save(weights, tmp_path / "second")
        found = sorted(path.name for path in (tmp_path / "second").iterdir())
        assert found == [
            "config.json",
            "generation_config.json",
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]

    def test_what_an_interrupted_save_left_is_not_mixed_in(self, source, tmp_path):
        files = checkpoints(source, tmp_path / "scratch")
        weights = files.load()
        (tmp_path / "scratch" / "epoch_0").mkdir(parents=True)
        (tmp_path / "scratch" / "epoch_0" / "model-00001-of-00002.safetensors").write_text("half")
        files.save(weights, tmp_path / "saved")
        assert not (tmp_path / "saved" / "model-00001-of-00002.safetensors").exists()

    def test_weights_in_two_forms_are_read_once(self, source, tmp_path):
        folder = tmp_path / "both"
        shutil.copytree(source, folder)
        (folder / "pytorch_model.bin").write_text("the same weights, pickled")
        assert len(checkpoints(folder, tmp_path).load()) == len(checkpoints(source, tmp_path).load())

    @pytest.mark.parametrize("missing", ["config.json", "model.safetensors", None])
    def test_a_folder_without_a_model_is_refused(self, source, tmp_path, missing):
        folder = tmp_path / "broken"
        if missing:
            shutil.copytree(source, folder)
            (folder / missing).unlink()
        with pytest.raises(ConfigError, match=rf"checkpointer\.checkpoint_dir={folder} is not a Hugging Face model"):
            checkpoints(folder, tmp_path).load()

    def test_damaged_weights_and_an_unknown_model_type_are_one_line(self, source, tmp_path):
        folder = tmp_path / "damaged"
        shutil.copytree(source, folder)
        (folder / "model.safetensors").write_bytes(b"\x00" * 100)
        with pytest.raises(ConfigError, match=rf"weights in {folder} cannot be read as model_type=LLAMA3_2"):
            checkpoints(folder, tmp_path).load()
        with pytest.raises(ConfigError, match="cannot be read as model_type=LLAMA9"):
            checkpoints(source, tmp_path, model_type="LLAMA9").load()


class TestBuildModel:
    def test_a_model_that_does_not_match_is_refused_with_the_differences(self, source, tmp_path):
        weights = checkpoints(source, tmp_path).load()
        with pytest.raises(ConfigError) as caught:
            build_model({**MODEL, "num_layers": 3}, weights, device=CPU, dtype=torch.float32)
        text = str(caught.value)
        assert text.startswith(
            "the checkpoint does not match torchtune.models.llama3_2.llama3_2: missing layers.2.attn."
        )
        assert "and 4 more; compare the builder's arguments" in text  # 9 tensors a layer, 5 of them shown
        with pytest.raises(
            ConfigError, match=r"tok_embeddings.weight has shape \(13, 16\), the model needs \(12, 16\)"
        ):
            build_model({**MODEL, "vocab_size": 12}, weights, device=CPU, dtype=torch.float32)
        with pytest.raises(ConfigError, match=r"not in the model: layers\.1\.attn\.k_proj\.weight"):
            build_model({**MODEL, "num_layers": 1}, weights, device=CPU, dtype=torch.float32)

    def test_matching_weights_pass(self, source, tmp_path):
        weights = checkpoints(source, tmp_path).load()
        check_weights_match(built(weights), weights, "x")

    def test_two_models_of_the_same_weights_share_nothing(self, source, tmp_path):
        weights = checkpoints(source, tmp_path).load()
        one, other = built(weights), built(weights)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.zero_()
        assert plain_logits(other, TOKENS).std() > 0.1
        assert weights["tok_embeddings.weight"].std() > 0.1

    def test_precision_is_that_of_the_parameters(self, source, tmp_path):
        model = build_model(MODEL, checkpoints(source, tmp_path).load(), device=CPU, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert torch.get_default_dtype() == torch.float32

    def test_every_parameter_is_trained_and_dropout_free_training_mode_is_on(self, source, tmp_path):
        model = built(checkpoints(source, tmp_path).load())
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())

    def test_activation_checkpointing_changes_no_gradient_and_no_name(self, source, tmp_path):
        weights = checkpoints(source, tmp_path).load()
        plain, saving = built(weights), built(weights, activation_checkpointing=True)
        for model in (plain, saving):
            model(torch.tensor([TOKENS])).logsumexp(-1).sum().backward()
        found = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(saving).items()}
        for name, gradient in gradients(plain).items():
            torch.testing.assert_close(found[name], gradient)
        assert full_state_dict(saving, CPU).keys() == weights.keys()
        names = [name for name, _ in saving.named_modules() if name.endswith("_checkpoint_wrapped_module")]
        assert len(names) == 2


def test_a_restored_optimizer_goes_on_as_if_it_had_never_stopped(source, tmp_path):
    weights = checkpoints(source, tmp_path).load()
    model = built(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(2):
        step(model, optimizer, seed)
    torch.save(optimizer_state(model, optimizer), tmp_path / "optimizer.pt")
    resumed = built(full_state_dict(model, CPU))
    restored = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    load_optimizer_state(resumed, restored, torch.load(tmp_path / "optimizer.pt", weights_only=True), CPU)
    fresh = built(full_state_dict(model, CPU))
    for each, its_optimizer in ((model, optimizer), (resumed, restored)):
        step(each, its_optimizer, seed=2)
    step(fresh, torch.optim.AdamW(fresh.parameters(), lr=1e-2), seed=2)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], tensor, rtol=0, atol=0)
    assert not torch.equal(fresh.state_dict()["norm.scale"], model.state_dict()["norm.scale"])
