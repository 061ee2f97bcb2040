"""Copying a trainer's parameters into an engine's model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class WeightUpdateError(ValueError):
    """An update did not fit the model.

    Args:
        reason: What does not fit.
        num_copied: Parameters that had been replaced by then.
    """

    def __init__(self, reason: str, num_copied: int) -> None:
        state = f"{num_copied} parameters were replaced already" if num_copied else "no parameter was changed"
        super().__init__(f"weight update failed: {reason}; {state}")
        self.num_copied = num_copied


def copy_parameters(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Copy tensors into a model by parameter name, one at a time.

    A tensor that *is* the model's parameter (same memory) is skipped, so a model shared with a trainer costs nothing.
    Persistent buffers may be among the tensors. Tied parameters may be sent under one of their names or under all.

    Args:
        model: Model to change.
        named_tensors: Every parameter under the name the model has for it, whole (not sharded); wrapper prefixes of
            ``torch.compile`` and activation checkpointing are ignored.

    Returns:
        Number of tensors copied; those skipped not counted.

    Raises:
        WeightUpdateError: If a name is unknown or missing, a shape differs, or a tensor is sharded.
    """
    targets = _named_targets(model)
    missing = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    num_copied = 0
    for full_name, tensor in named_tensors:
        name = canonical_name(full_name)
        target = targets.get(name)
        if target is None:
            raise WeightUpdateError(f"the model has no parameter {name!r}; it has {_few(list(targets))}", num_copied)
        if target.shape != tensor.shape:
            reason = f"{name!r} has shape {list(target.shape)}, got {list(tensor.shape)}"
            raise WeightUpdateError(reason, num_copied)
        if hasattr(tensor, "full_tensor"):
            raise WeightUpdateError(f"{name!r} is sharded; send tensor.full_tensor()", num_copied)
        missing.pop(id(target), None)
        if not _same_memory(target, tensor):
            with torch.no_grad():
                target.copy_(tensor)
            num_copied += 1
    if missing:
        names = _few(list(missing.values()))
        raise WeightUpdateError(f"{len(missing)} parameters of the model were not sent: {names}", num_copied)
    return num_copied


def canonical_name(name: str) -> str:
    """Return a parameter's name without wrapper prefixes.

    Example:
        >>> canonical_name("layers.0._checkpoint_wrapped_module.attn.q_proj.weight")
        'layers.0.attn.q_proj.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _named_targets(model: nn.Module) -> dict[str, Tensor]:
    targets: dict[str, Tensor] = {}
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            targets[canonical_name(name)] = buffer
    for name, parameter in model.named_parameters(remove_duplicate=False):
        targets[canonical_name(name)] = parameter
    return targets


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return (
        left.device == right.device
        and left.dtype == right.dtype
        and left.data_ptr() == right.data_ptr()
        and left.stride() == right.stride()
    )


def _few(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
