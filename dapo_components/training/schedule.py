"""Learning-rate schedules: linear warm-up, then constant or cosine."""

from __future__ import annotations

import math
from typing import Literal


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


def is_due(step: int, every: int) -> bool:
    """Whether something done every ``every`` steps (0: never) is due after ``step``.

    Example:
        >>> is_due(10, 5), is_due(11, 5), is_due(10, 0)
        (True, False, False)
    """
    return every > 0 and step % every == 0
