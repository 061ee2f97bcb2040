"""The embedded default's model: a randomly initialised Llama of about a million parameters in a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dapo_components.data.character_tokenizer import EOS_TOKEN, PAD_TOKEN, VOCABULARY, write_character_tokenizer


@dataclass(frozen=True, kw_only=True)
class TinyArchitecture:
    """Sizes of the decoder; the defaults are those that ``tiny_cpu*.yaml`` pass to ``llama3_2``.

    Args:
        vocab_size: Number of tokens.
        num_layers: Decoder layers.
        num_heads: Query heads; as many key and value heads.
        embed_dim: Width of the residual stream; a multiple of ``num_heads``.
        intermediate_dim: Width of the gated MLP.
        max_seq_len: Longest sequence, in tokens.
        rope_base: Base of the rotary position embedding.
        norm_eps: Epsilon of the RMS norms.

    Raises:
        ValueError: If a size is not positive or ``num_heads`` does not divide ``embed_dim`` into even heads.
    """

    vocab_size: int = len(VOCABULARY)
    num_layers: int = 3
    num_heads: int = 5
    embed_dim: int = 160
    intermediate_dim: int = 448
    max_seq_len: int = 256
    rope_base: int = 10_000
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "num_heads", "embed_dim", "intermediate_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.embed_dim % (2 * self.num_heads):
            raise ValueError(
                f"embed_dim must be a multiple of 2 * num_heads = {2 * self.num_heads} (heads of even width), "
                f"got {self.embed_dim}"
            )


def build_tiny(folder: str | Path, *, seed: int, architecture: TinyArchitecture | None = None) -> Path:
    """Write a randomly initialised model that transformers, vLLM and torchtune load.

    The folder holds ``config.json`` (``LlamaForCausalLM``, tied embeddings), ``generation_config.json``,
    ``model.safetensors`` in float32 and the character tokenizer.

    Args:
        folder: Where to write; created if missing, files of the same names are replaced.
        seed: Decides the weights and nothing else.
        architecture: Sizes; the default's if None.

    Returns:
        The folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(path.name for path in build_tiny(folder, seed=0).iterdir())[:3]
        ['config.json', 'generation_config.json', 'model.safetensors']
    """
    from safetensors.torch import save_file

    architecture = architecture or TinyArchitecture()
    folder = Path(folder)
    write_character_tokenizer(folder, model_max_length=architecture.max_seq_len)
    _write_json(folder / "config.json", _llama_config(architecture))
    _write_json(folder / "generation_config.json", {"do_sample": True, **_special_token_ids()})
    weights = dict(_initial_weights(architecture, torch.Generator().manual_seed(seed)))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _initial_weights(architecture: TinyArchitecture, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by Hugging Face name, scaled by the width they read from."""
    width, inner, num_layers = architecture.embed_dim, architecture.intermediate_dim, architecture.num_layers

    def normal(rows: int, columns: int, std: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    yield "model.embed_tokens.weight", normal(architecture.vocab_size, width, width**-0.5)
    # What a layer adds to the residual stream shrinks with depth, so that its variance stays of order one.
    residual = (2 * num_layers) ** -0.5
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{prefix}.self_attn.{name}.weight", normal(width, width, width**-0.5)
        yield f"{prefix}.self_attn.o_proj.weight", normal(width, width, residual * width**-0.5)
        yield f"{prefix}.mlp.gate_proj.weight", normal(inner, width, width**-0.5)
        yield f"{prefix}.mlp.up_proj.weight", normal(inner, width, width**-0.5)
        yield f"{prefix}.mlp.down_proj.weight", normal(width, inner, residual * inner**-0.5)
        yield f"{prefix}.input_layernorm.weight", torch.ones(width)
        yield f"{prefix}.post_attention_layernorm.weight", torch.ones(width)
    yield "model.norm.weight", torch.ones(width)


def _llama_config(architecture: TinyArchitecture) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.embed_dim,
        "intermediate_size": architecture.intermediate_dim,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_heads,
        "head_dim": architecture.embed_dim // architecture.num_heads,
        "max_position_embeddings": architecture.max_seq_len,
        "rope_theta": float(architecture.rope_base),
        "rms_norm_eps": architecture.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "torch_dtype": "float32",
        **_special_token_ids(),
    }


def _special_token_ids() -> dict[str, int | None]:
    return {"bos_token_id": None, "eos_token_id": VOCABULARY[EOS_TOKEN], "pad_token_id": VOCABULARY[PAD_TOKEN]}


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
