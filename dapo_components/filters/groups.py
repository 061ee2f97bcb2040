"""Group filters that read one score per response: ``B`` groups of ``G`` responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from tensordict import TensorDictBase
from torch import Tensor

from dapo_components.data.component import as_key, read_key
from dapo_components.data.keys import Key
from dapo_components.filters.base import FilterDecision
from dapo_components.functional.groups import informative_mask
from dapo_components.functional.reductions import masked_mean

__all__ = ["AccuracyBoundsFilter", "NonZeroStdFilter"]


@final
class NonZeroStdFilter:
    """Keep the groups whose responses differ in score: the others have advantage 0 (dynamic sampling, DAPO Eq. 11).

    With 0/1 accuracy this is ``0 < number correct < G``. Scores are compared by range, so equal scores that float32
    rounds are still equal. The reason of a dropped group names its common score: all 1 is too easy, all 0 too hard.

    Args:
        key: Score to look at, ``[B, G]``. The default is correctness before any shaping, and should stay that: a length
            penalty makes the rewards of a hopeless group differ.
        atol: Scores this close are equal.
        valid_key: Where usable responses are marked, ``[B, G]`` bool; None uses all.

    Raises:
        ValueError: If ``atol`` is negative.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"accuracy": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}, batch_size=[2, 2])
        >>> decision = NonZeroStdFilter()(batch)
        >>> decision.keep, decision.reasons
        (tensor([ True, False]), ['', 'accuracy all 1'])
    """

    def __init__(self, *, key: Key = "accuracy", atol: float = 1e-6, valid_key: Key | None = None) -> None:
        if not atol >= 0.0:
            raise ValueError(f"atol must be at least 0, got {atol}")
        self.key, self.atol = as_key(key), atol
        self.valid_key = None if valid_key is None else as_key(valid_key)

    def __call__(self, batch: TensorDictBase) -> FilterDecision:
        """Decide about a batch of size ``[B, G]``."""
        score, valid = _read_score(batch, self.key, self.valid_key, reader="NonZeroStdFilter")
        keep = informative_mask(score, valid=valid, atol=self.atol)
        name = _name(self.key)

        def explain(mean: float, num_valid: int) -> str:
            if num_valid < 2:
                return "fewer than 2 usable responses"
            return f"{name} all {mean:.3g}" if mean == mean else f"{name} not a number"

        return _decide(keep, masked_mean(score, valid, dim=-1), valid, explain)


@final
class AccuracyBoundsFilter:
    """Keep the groups whose mean score lies strictly between two bounds.

    The defaults drop groups that are all right or all wrong, as ``NonZeroStdFilter`` does for 0/1 accuracy; narrower
    bounds make a curriculum. For rewards of -1 and 1 the bounds are -1 and 1.

    Args:
        lower: The mean must be above this.
        upper: The mean must be below this.
        key: Score to look at, ``[B, G]``; correctness before any shaping.
        valid_key: Where usable responses are marked, ``[B, G]`` bool; None uses all.

    Raises:
        ValueError: If ``lower`` is not below ``upper``.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"accuracy": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}, batch_size=[2, 2])
        >>> AccuracyBoundsFilter()(batch).reasons
        ['', 'mean accuracy >= 1']
    """

    def __init__(
        self, *, lower: float = 0.0, upper: float = 1.0, key: Key = "accuracy", valid_key: Key | None = None
    ) -> None:
        if not lower < upper:
            raise ValueError(f"lower must be below upper={upper}, got {lower}")
        self.lower, self.upper, self.key = lower, upper, as_key(key)
        self.valid_key = None if valid_key is None else as_key(valid_key)

    def __call__(self, batch: TensorDictBase) -> FilterDecision:
        """Decide about a batch of size ``[B, G]``."""
        score, valid = _read_score(batch, self.key, self.valid_key, reader="AccuracyBoundsFilter")
        mean = masked_mean(score, valid, dim=-1)
        keep = (mean > self.lower) & (mean < self.upper) & valid.any(dim=-1)
        name = _name(self.key)

        def explain(mean: float, num_valid: int) -> str:
            if num_valid == 0:
                return "no usable response"
            if mean <= self.lower:
                return f"mean {name} <= {self.lower:.3g}"
            return f"mean {name} >= {self.upper:.3g}" if mean >= self.upper else f"mean {name} not a number"

        return _decide(keep, mean, valid, explain)


def _read_score(batch: TensorDictBase, key: Key, valid_key: Key | None, *, reader: str) -> tuple[Tensor, Tensor]:
    """Return scores and usable rows, ``[B, G]``; in float64 a mean of 0/1 scores compares exactly with a bound."""
    score = read_key(batch, key, reader=reader).to(torch.float64)
    if score.ndim != 2:
        raise ValueError(f"{reader} needs {key!r} of shape [B, G], got {tuple(score.shape)}; a group is a dimension")
    if valid_key is None:
        return score, torch.ones_like(score, dtype=torch.bool)
    return score, read_key(batch, valid_key, reader=reader)


def _decide(keep: Tensor, mean: Tensor, valid: Tensor, explain: Callable[[float, int], str]) -> FilterDecision:
    """Give every dropped group its reason."""
    rows = zip(keep.tolist(), mean.tolist(), valid.sum(dim=-1).tolist(), strict=True)
    return FilterDecision(keep, ["" if kept else explain(value, num_valid) for kept, value, num_valid in rows])


def _name(key: Key) -> str:
    return key if isinstance(key, str) else ".".join(key)
