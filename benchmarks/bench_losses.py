"""``DAPOLoss`` from log-probs: the block, the function it calls, and the same loss in plain torch without metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from dapo_components.functional.objectives import clipped_policy_objective
from dapo_components.functional.reductions import BatchCounts
from dapo_components.losses import DAPOLoss

# Prompts, responses per prompt, response tokens: a tiny step, a micro-batch, and a tenth of the paper's mini-batch.
SIZES = {"tiny": (8, 8, 24), "micro_batch": (4, 2, 2048), "large": (32, 16, 2048)}
KEYS = ("log_prob", "old_log_prob", "ref_log_prob", "rollout_log_prob", "entropy")
# What DAPO uses, and every term switched on.
SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "all_terms": {"dual_clip": 10.0, "kl_coef": 0.01, "entropy_coef": 0.01, "rollout_correction": {"level": "token"}},
}


def make_batch(size: tuple[int, int, int], device: torch.device, *, every_key: bool) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(1, size[2] + 1, size[:2], generator=generator)
    batch = {name: -torch.rand(size, generator=generator) for name in (KEYS if every_key else KEYS[:2])}
    batch["loss_mask"] = torch.arange(size[2]) < length.unsqueeze(-1)
    batch["advantage"] = torch.randn(size[:2], generator=generator)
    moved = TensorDict(batch, batch_size=size[:2]).to(device)
    moved["log_prob"].requires_grad_()
    return moved


def plain_torch(batch: TensorDict) -> Tensor:
    """The least that the loss of DAPO needs."""
    mask = batch["loss_mask"]
    advantage = batch["advantage"].unsqueeze(-1)
    ratio = torch.where(mask, batch["log_prob"] - batch["old_log_prob"], 0.0).exp()
    per_token = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    return (per_token * mask).sum() / mask.sum()


def forward_and_backward(loss: Callable[[], Tensor], log_prob: Tensor) -> Tensor:
    return torch.autograd.grad(loss(), log_prob)[0]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="policy loss from log-probs, forward and backward")
def test_block(timed, device, size, settings):
    batch = make_batch(SIZES[size], device, every_key=settings != "dapo")
    counts = BatchCounts.from_mask(batch["loss_mask"])
    loss_fn = DAPOLoss(**SETTINGS[settings])
    timed(forward_and_backward, lambda: loss_fn(batch, counts=counts).loss, batch["log_prob"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="policy loss from log-probs, forward and backward")
def test_function(timed, device, size):
    batch = make_batch(SIZES[size], device, every_key=False)
    counts = BatchCounts.from_mask(batch["loss_mask"])
    inputs = [batch[name] for name in ("log_prob", "old_log_prob", "advantage", "loss_mask")]
    timed(forward_and_backward, lambda: clipped_policy_objective(*inputs, counts=counts)["loss"], inputs[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="policy loss from log-probs, forward and backward")
def test_plain_torch(timed, device, size):
    batch = make_batch(SIZES[size], device, every_key=False)
    gradient = timed(forward_and_backward, lambda: plain_torch(batch), batch["log_prob"])
    torch.testing.assert_close(gradient, forward_and_backward(lambda: DAPOLoss()(batch).loss, batch["log_prob"]))
