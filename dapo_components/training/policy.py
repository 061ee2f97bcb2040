"""Log-probs of a batch under a model: packed micro-batches in, ``[B, G, T]`` tensors out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, overload

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from dapo_components.data.component import read_key
from dapo_components.data.packing import PackedTokens, Row, pack_micro_batch, plan_micro_batches
from dapo_components.functional.log_probs import linear_log_probs
from dapo_components.training.causal_lm import forward_with_head
from dapo_components.training.distributed import all_reduce_max


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """How a policy turns tokens into log-probs.

    Args:
        temperature: Of the sampler; the trainer divides its logits by the same number.
        max_tokens: Token budget of a micro-batch.
        max_shared_length: Longest row in which responses share their prompt.
        chunk_size: Response positions that meet the vocabulary head at once.
        compute_dtype: ``"fp32"``, or ``"bf16"`` for autocast around parameters kept in float32.

    Raises:
        ValueError: If ``compute_dtype`` is not a known name.
    """

    temperature: float = 1.0
    max_tokens: int = 4096
    max_shared_length: int = 512
    chunk_size: int = 1024
    compute_dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.compute_dtype not in ("fp32", "bf16"):
            raise ValueError(f"compute_dtype must be 'fp32' or 'bf16', got {self.compute_dtype!r}")


@overload
def packed_log_probs(
    model: nn.Module, packed: PackedTokens, settings: ForwardSettings, *, with_entropy: Literal[True]
) -> tuple[Tensor, Tensor]: ...


@overload
def packed_log_probs(
    model: nn.Module, packed: PackedTokens, settings: ForwardSettings, *, with_entropy: Literal[False] = False
) -> tuple[Tensor, None]: ...


def packed_log_probs(
    model: nn.Module, packed: PackedTokens, settings: ForwardSettings, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (and entropies) of the tokens that a packed micro-batch predicts.

    Only the ``M`` predicting positions reach the vocabulary head, and no ``[M, V]`` tensor is made.

    Args:
        model: torchtune decoder or Hugging Face causal LM; under FSDP2 its root.
        packed: Inputs from :func:`~dapo_components.data.packing.pack_micro_batch`, on the model's device.
        settings: Temperature, chunk size and precision.
        with_entropy: Also return the entropy of each prediction, in nats.

    Returns:
        ``[M]`` log-probs in float32 and ``[M]`` entropies or None.
    """

    def head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        predicting = hidden.flatten(0, 1)[packed.source]
        result = linear_log_probs(
            predicting,
            weight,
            packed.target_tokens,
            bias=bias,
            temperature=settings.temperature,
            chunk_size=settings.chunk_size,
            with_entropy=with_entropy,
        )
        return result if isinstance(result, tuple) else (result, None)

    with _autocast(packed.tokens.device, settings.compute_dtype):
        return forward_with_head(model, packed.tokens, packed.positions, packed.attention_mask, head=head)  # pyright: ignore[reportArgumentType, reportReturnType]


def micro_batches(
    batch: TensorDictBase, settings: ForwardSettings, *, mask_key: str = "loss_mask", device: torch.device
) -> Iterator[PackedTokens | None]:
    """Yield the packed micro-batches of a ``[B, G]`` batch, as many on every rank.

    Ranks must run the same number of forward passes under FSDP2, so a rank with fewer yields None at the end: run the
    model on :func:`idle_packed` for it. A collective.

    Args:
        batch: Holds prompts, responses and the mask at ``mask_key``; on the CPU.
        settings: Token budget and row length.
        mask_key: Positions whose prediction is wanted; a response without one costs nothing.
        device: Where the model is.
    """
    prompt_tokens, prompt_mask, response_tokens, mask = (
        read_key(batch, key, reader="micro_batches").flatten(0, 1)
        for key in ("prompt_tokens", "prompt_mask", "response_tokens", mask_key)
    )
    position = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    # Tokens after the last wanted one cannot influence it.
    needed = torch.where(mask, position, 0).amax(dim=-1).tolist() if mask.numel() else [0] * mask.shape[0]
    group = torch.arange(batch.shape[0]).repeat_interleave(batch.shape[1]).tolist()
    plan: list[list[Row]] = plan_micro_batches(
        prompt_mask.sum(-1).tolist(),
        needed,
        group,
        max_tokens=settings.max_tokens,
        max_shared_length=settings.max_shared_length,
    )
    # Agreed before any pass: a rank that asked after its last one would find the others in a collective of FSDP.
    num_idle = all_reduce_max(len(plan)) - len(plan)
    for rows in plan:
        yield pack_micro_batch(rows, prompt_tokens, prompt_mask, response_tokens, needed, mask).to(device)
    for _ in range(num_idle):
        yield None


def idle_packed(device: torch.device) -> PackedTokens:
    """Return the smallest input a model accepts: a rank without work left runs it to stay in step with the others."""
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    return PackedTokens(one, one, None, source=one[0], target_tokens=one[0], responses=one[0], target=one[0])


@torch.no_grad()
def batch_log_probs(
    model: nn.Module, batch: TensorDictBase, settings: ForwardSettings, *, mask_key: str = "response_mask"
) -> Tensor:
    """Log-probs of all response tokens without gradient.

    Args:
        model: See :func:`packed_log_probs`.
        batch: ``[B, G]`` batch, on the CPU.
        settings: See :class:`ForwardSettings`.
        mask_key: Positions to compute; the others are 0.

    Returns:
        ``[B, G, T]`` float32, on the CPU.
    """
    device = next(model.parameters()).device
    result = torch.zeros(batch["response_tokens"].shape, dtype=torch.float32)
    rows = result.flatten(0, 1)
    for packed in micro_batches(batch, settings, mask_key=mask_key, device=device):
        log_prob, _ = packed_log_probs(model, packed or idle_packed(device), settings)
        if packed is not None:
            rows[packed.responses.cpu()] = packed.scatter(log_prob, rows.shape[-1]).cpu()
    return result


def _autocast(device: torch.device, compute_dtype: str) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if compute_dtype == "bf16" else nullcontext()
