"""What one reward says about one response."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Score of one response with the reasons for it.

    Args:
        score: The reward, finite.
        correct: Whether the answer is right; becomes the accuracy that group filters read.
        extracted: The answer found in the response, ``None`` without one.
        status: ``"ok"``, or why the answer could not be judged; counted in the metrics.
        error: What went wrong while scoring, ``None`` if nothing did.

    Raises:
        ValueError: If ``score`` is not finite.

    Example:
        >>> RewardResult(score=1.0, correct=True, extracted="42").status
        'ok'
    """

    score: float
    correct: bool
    extracted: str | None = None
    status: str = "ok"
    error: str | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.score):
            raise ValueError(f"score must be finite, got {self.score}")
