"""Memory of a training step, estimated on the meta device before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dapo_components.training.batch_arithmetic import BatchArithmetic
from dapo_components.training.causal_lm import backbone_hidden, head_parameters
from dapo_components.training.config import build

GIB = 1024**3
_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per rank, by what holds them.

    Args:
        parts: Name to bytes.
    """

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Sum of all parts, in bytes."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """Return one line per part, in GiB."""
        lines = [f"{name:<29} {size / GIB:>10.2f} GiB" for name, size in self.parts.items()]
        return "\n".join([*lines, f"{'total per rank, estimated':<29} {self.total / GIB:>10.2f} GiB"])


def estimate_memory(
    model: nn.Module,
    *,
    max_tokens: int,
    max_sequence_length: int,
    world_size: int = 1,
    dtype: str = "fp32",
    compute_dtype: str = "fp32",
    activation_checkpointing: bool = False,
    reference_model: bool = False,
    generator_copy: bool = False,
    head_chunk_size: int = 1024,
) -> MemoryEstimate:
    """Estimate what one rank needs to train ``model`` with AdamW.

    Activations are counted by running the model on the meta device and adding up what autograd would save; matrices of
    attention scores are left out, since fused attention does not keep them. Not included: the generator's key-value
    cache, communication buffers, fragmentation.

    Args:
        model: Model on the meta device.
        max_tokens: Tokens of a micro-batch.
        max_sequence_length: Longest sequence in it.
        world_size: Ranks that share parameters, gradients and optimizer state.
        dtype: Of the parameters, ``fp32`` or ``bf16``.
        compute_dtype: Of the activations.
        activation_checkpointing: Whether only layer inputs are kept.
        reference_model: Whether a frozen copy is held for the KL term.
        generator_copy: Whether the sampler holds its own full copy.
        head_chunk_size: Positions that meet the vocabulary head at once.

    Returns:
        Bytes by part.

    Raises:
        ValueError: If the model is not on the meta device, or cannot read sequences this long.

    Example:
        >>> from torchtune.models.llama3_2 import llama3_2
        >>> with torch.device("meta"):
        ...     model = llama3_2(
        ...         vocab_size=100, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=8, max_seq_len=64,
        ...         intermediate_dim=16,
        ...     )
        >>> estimate_memory(model, max_tokens=64, max_sequence_length=32).parts["parameters"]
        5856
    """
    parameters = list(model.parameters())
    if any(parameter.device.type != "meta" for parameter in parameters):
        raise ValueError("estimate_memory needs a model on the meta device; build it under `with torch.device('meta')`")
    _complete_rotary_caches(model)
    size = sum(parameter.numel() for parameter in parameters) * _BYTES[dtype]
    shard = -(-size // world_size)
    weight, _ = head_parameters(model)
    parts = {"parameters": shard, "gradients": shard, "AdamW state": 2 * shard}
    if world_size > 1:
        layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(model)]
        unsharded = (2 * max(layers, default=0) + 2 * weight.numel()) * _BYTES[dtype]
        parts["gathered layers"] = unsharded
    if reference_model:
        parts["reference policy"] = shard
    if generator_copy:
        parts["sampler's copy"] = size
    saved = _saved_elements(model, max_tokens, max_sequence_length, activation_checkpointing)
    parts["activations"] = saved * _BYTES[compute_dtype]
    parts["vocabulary head"] = 2 * head_chunk_size * weight.shape[0] * 4 + weight.numel() * 4
    return MemoryEstimate(parts)


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList()))


def _complete_rotary_caches(model: nn.Module) -> None:
    """Give torchtune's scaled rotary embeddings, which wait for a real device, a cache of the right shape."""
    for module in model.modules():
        if not getattr(module, "is_cache_built", True):
            rotary: Any = module
            rotary.register_buffer("theta", torch.empty(rotary.dim // 2, device="meta"), persistent=False)
            rotary.build_rope_cache(rotary.max_seq_len)
            rotary.is_cache_built = True


def _saved_elements(model: nn.Module, max_tokens: int, max_sequence_length: int, checkpointing: bool) -> int:
    """Count the elements autograd saves for one micro-batch, by running one sequence and scaling with its length."""
    length = _probe_length(model, max_sequence_length)
    saved: dict[int, Tensor] = {}
    owned = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        scores = tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2] == length
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in owned and not scores and tensor.is_floating_point():
            saved[id(base)] = base  # keeping the tensor alive keeps its id unique
        return tensor

    tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
    # Without a mask transformers reads the positions to tell packed sequences apart, which a meta tensor cannot show.
    mask = torch.ones(1, length, length, dtype=torch.bool, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = backbone_hidden(model, tokens, mask=mask)
    kept = sum(tensor.numel() for tensor in saved.values())
    layers = max(1, len(_layers(model)))
    if checkpointing:
        kept = kept // layers + layers * hidden.numel()
    return -(-kept * max_tokens // length)


def _probe_length(model: nn.Module, longest: int) -> int:
    """Return a length that no width of the model has, so that only attention scores are square in it."""
    widths = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    widths |= {module.head_dim for module in model.modules() if isinstance(getattr(module, "head_dim", None), int)}
    return next((length for length in range(longest, 0, -1) if length not in widths), longest)


def describe_run(model: Mapping[str, Any], sizes: BatchArithmetic, **options: Any) -> str:
    """Return what a dry run prints: the batch arithmetic and a memory estimate; no weight is loaded.

    Args:
        model: Component of the model.
        sizes: Sizes of a rollout step.
        options: Precision and what else is held in memory, as in :func:`estimate_memory`.
    """
    with torch.device("meta"):
        built = build(model)
    estimate = estimate_memory(
        built,
        max_tokens=sizes.max_tokens_per_micro_batch,
        max_sequence_length=sizes.max_sequence_length,
        world_size=sizes.world_size,
        generator_copy=sizes.world_size > 1,
        **options,
    )
    num_parameters = sum(parameter.numel() for parameter in built.parameters())
    return f"{sizes.describe()}\n\n{'parameters of the model':<29} {num_parameters:>10,}\n{estimate.describe()}"
