"""Memory of a training step, estimated on the meta device before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dapo_components.training.causal_lm import backbone_hidden, head_parameters

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
        ValueError: If the model is not on the meta device.
    """
    parameters = list(model.parameters())
    if any(parameter.device.type != "meta" for parameter in parameters):
        raise ValueError("estimate_memory needs a model on the meta device; build it under `with torch.device('meta')`")
    size = sum(parameter.numel() for parameter in parameters) * _BYTES[dtype]
    shard = -(-size // world_size)
    weight, _ = head_parameters(model)
    parts = {"parameters": shard, "gradients": shard, "AdamW state": 2 * shard}
    if world_size > 1:
        layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(model)]
        unsharded = (2 * max(layers, default=0) + 2 * weight.numel()) * _BYTES[compute_dtype]
        parts["gathered layers"] = unsharded
    if reference_model:
        parts["reference policy"] = shard
    if generator_copy:
        parts["sampler's copy"] = size
    parts["activations"] = (
        _activation_bytes(model, max_tokens, max_sequence_length, activation_checkpointing) * (_BYTES[compute_dtype])
    )
    parts["vocabulary head"] = 2 * head_chunk_size * weight.shape[0] * 4 + weight.numel() * 4
    return MemoryEstimate(parts)


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList()))


def _activation_bytes(model: nn.Module, max_tokens: int, length: int, checkpointing: bool) -> int:
    """Count the elements autograd saves for one micro-batch, by running one row and scaling."""
    saved: dict[int, tuple[Tensor, int]] = {}
    owned = {id(parameter) for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        scores = tensor.dim() >= 2 and tensor.shape[-1] == length and tensor.shape[-2] == length
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in owned and not scores and tensor.is_floating_point():
            saved[id(base)] = (base, base.numel())  # keeping the tensor alive keeps its id unique
        return tensor

    tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = backbone_hidden(model, tokens)
    kept = sum(count for _, count in saved.values())
    layers = max(1, len(_layers(model)))
    if checkpointing:
        kept = kept // layers + layers * hidden.numel()
    return kept * -(-max_tokens // length)
