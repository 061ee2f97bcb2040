"""Collectives that are the identity in one process, so that a loop reads the same with and without ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dapo_components.functional.reductions import BatchCounts

Item = TypeVar("Item")


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of processes; ``(0, 1)`` without a process group.

    Example:
        >>> rank_and_world_size()
        (0, 1)
    """
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def start_process_group(device: torch.device, *, timeout_minutes: float) -> None:
    """Join the other ranks: gloo for tensors on the CPU and Python objects, NCCL beside it for those on a GPU.

    Args:
        device: Where this rank's model lives.
        timeout_minutes: How long a rank waits for the slowest one, which may be generating or writing a checkpoint.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))


def all_reduce_counts(mask: Tensor) -> BatchCounts:
    """Count tokens, sequences and groups of a whole optimizer step, over all ranks.

    A token mean over ranks with unequal token counts is only right with the global denominator: FSDP and DDP average
    gradients, so the loss is multiplied by ``world_size``, which the result carries.

    Args:
        mask: ``[B, G, T]`` bool loss mask of this rank's share, all micro-batches together.

    Example:
        >>> all_reduce_counts(torch.ones(2, 3, 4, dtype=torch.bool)).num_tokens
        tensor(24)
    """
    local = BatchCounts.from_mask(mask)
    _, world_size = rank_and_world_size()
    if world_size == 1:
        return local
    names = ("num_tokens", "num_sequences", "num_groups")
    total = all_reduce_sum({name: getattr(local, name) for name in names})
    return BatchCounts(**total, world_size=world_size)


def all_reduce_sum(values: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Sum each named scalar over ranks in one collective, in float64.

    Example:
        >>> all_reduce_sum({"reward": 1.5})
        {'reward': tensor(1.5000, dtype=torch.float64)}
    """
    return _reduce(values, dist.ReduceOp.SUM)


def all_reduce_max(value: int) -> int:
    """Return the largest ``value`` of any rank.

    Example:
        >>> all_reduce_max(3)
        3
    """
    return int(_reduce({"value": value}, dist.ReduceOp.MAX)["value"])


def all_reduce_maxima(values: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Take the maximum of each named scalar over ranks; it is NaN if one of them is.

    Example:
        >>> all_reduce_maxima({"ratio_max": 1.5})
        {'ratio_max': tensor(1.5000, dtype=torch.float64)}
    """
    numbers = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()}
    # Whether max(nan, 1) is nan depends on the backend and on the order of the ranks.
    is_nan = {f"nan/{name}": number.isnan() for name, number in numbers.items()}
    comparable = {name: torch.where(number.isnan(), -math.inf, number) for name, number in numbers.items()}
    largest = _reduce({**comparable, **is_nan}, dist.ReduceOp.MAX)
    return {name: torch.where(largest[f"nan/{name}"] > 0, math.nan, largest[name]) for name in values}


def all_gather(item: Item) -> list[Item]:
    """Return the ``item`` of every rank, in rank order; it must be picklable.

    Example:
        >>> all_gather("a")
        ['a']
    """
    _, world_size = rank_and_world_size()
    gathered: list[Item | None] = [item] * world_size
    if world_size > 1:
        dist.all_gather_object(gathered, item)
    return gathered  # pyright: ignore[reportReturnType]


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the trainer's parameters one at a time, gathered if they are sharded.

    Every rank must exhaust the iterator: gathering is a collective.

    Example:
        >>> [name for name, _ in full_parameters(nn.Linear(1, 1))]
        ['weight', 'bias']
    """
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        yield (
            name.replace("_checkpoint_wrapped_module.", ""),
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor,
        )


def _reduce(values: Mapping[str, Tensor | float], operation: dist.ReduceOp.RedOpType) -> dict[str, Tensor]:
    if not values:
        return {}
    stacked = torch.stack([torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in values.values()])
    if rank_and_world_size()[1] > 1:
        on_device = stacked.to(_collective_device())
        dist.all_reduce(on_device, operation)
        stacked = on_device.cpu()
    return dict(zip(values, stacked, strict=True))


def _collective_device() -> torch.device:
    """NCCL reduces CUDA tensors only; gloo takes CPU tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
