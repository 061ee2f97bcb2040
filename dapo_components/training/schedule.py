"""Learning-rate schedules: linear warm-up, then constant or cosine."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, final

from torch.optim import Optimizer


def learning_rate_factor(
    step: int, *, warmup_steps: int, num_steps: int, decay: Literal["constant", "cosine"] = "constant"
) -> float:
    """Return the factor on the base learning rate for one optimizer step.

    Rises linearly to 1 over ``warmup_steps`` (the first step already moves: factor ``1 / warmup_steps``), then stays,
    or falls to 0 along half a cosine.

    Args:
        step: Optimizer steps already taken.
        warmup_steps: Optimizer steps of the rise; 0 starts at the full rate.
        num_steps: Optimizer steps of the whole run.
        decay: What follows the rise.

    Raises:
        ValueError: If ``decay`` is not a known name.

    Example:
        >>> [learning_rate_factor(step, warmup_steps=2, num_steps=10) for step in range(4)]
        [0.5, 1.0, 1.0, 1.0]
    """
    if decay not in ("constant", "cosine"):
        raise ValueError(f"decay must be 'constant' or 'cosine', got {decay!r}")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


@final
class LearningRate:
    """Set an optimizer's learning rate for each step; a function of the step alone, so nothing is to be saved.

    Args:
        optimizer: Its present learning rates are the base of the schedule.
        warmup_steps: See :func:`learning_rate_factor`.
        num_steps: See :func:`learning_rate_factor`.
        decay: See :func:`learning_rate_factor`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> LearningRate(optimizer, warmup_steps=2, num_steps=10).set(0), optimizer.param_groups[0]["lr"]
        (0.25, 0.25)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_steps: int,
        num_steps: int,
        decay: Literal["constant", "cosine"] = "constant",
    ) -> None:
        self._optimizer = optimizer
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._factor = partial(learning_rate_factor, warmup_steps=warmup_steps, num_steps=num_steps, decay=decay)

    def set(self, step: int) -> float:
        """Set the rates of the step after ``step`` optimizer steps; returns that of the first parameter group."""
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * self._factor(step)
        return self._base[0] * self._factor(step)


def is_due(step: int, every: int) -> bool:
    """Whether something done every ``every`` steps (0: never) is due after ``step``.

    Example:
        >>> is_due(10, 5), is_due(11, 5), is_due(10, 0)
        (True, False, False)
    """
    return every > 0 and step % every == 0
