"""Several rewards as one: call them, check what they return, weigh it, and keep every component."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from dapo_components.data.names import nearest_name
from dapo_components.rewards.functions import RewardFunction, Row, accepted_inputs, resolve_reward, score_list
from dapo_components.rewards.result import RewardResult

_LARGEST = torch.finfo(torch.float32).max
_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True)
class RewardScores:
    """Scores of ``N`` responses.

    Args:
        accuracy: [N] float32, correctness by the accuracy component; NaN where it does not apply.
        reward: [N] float32, weighted sum of the components that apply.
        components: Name -> [N] float32, before weighting; NaN where the component returned None.
        results: Name -> what the component returned for each response; None where it does not apply.
        statuses: Name -> how often each status occurred; ``not_applicable`` counts None.
    """

    accuracy: Tensor
    reward: Tensor
    components: dict[str, Tensor]
    results: dict[str, list[Row]]
    statuses: dict[str, dict[str, int]]


@final
class RewardSet:
    """Named reward functions, called on the same responses.

    Args:
        rewards: Name -> a callable, an import path ``"package.module:function"``, or a mapping with ``_component_`` (a
            dotted path) and the arguments to build it with, as in a config.
        weights: Name -> factor in the sum; 1 for names left out.
        accuracy_key: Component whose correctness is the accuracy. Needed with more than one component. The accuracy of
            a plain float is the float itself, that of a :class:`RewardResult` is 1 or 0.
        on_error: ``"raise"`` stops when a component raises or returns a number that is not finite; ``"zero"`` scores
            the responses concerned 0, not correct, counts them as status ``error`` and logs it.

    Raises:
        ValueError: If there is no reward, a name is unknown, a weight is not finite, or something is not callable.

    Example:
        >>> def length_bonus(completions, **columns):
        ...     return [len(text) / 10 for text in completions]
        >>> rewards = RewardSet({"length": length_bonus}, weights={"length": 0.5})
        >>> rewards(prompts=["hi"], completions=["abcd"], completion_ids=[[1, 2]]).reward
        tensor([0.2000])
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardFunction | str | Mapping[str, Any]],
        weights: Mapping[str, float] | None = None,
        accuracy_key: str | None = None,
        on_error: Literal["raise", "zero"] = "raise",
    ) -> None:
        if not rewards:
            raise ValueError("rewards must name at least one reward function, got none")
        if on_error not in ("raise", "zero"):
            raise ValueError(f"on_error must be 'raise' or 'zero', got {on_error!r}")
        self.rewards = {str(name): resolve_reward(str(name), reward) for name, reward in rewards.items()}
        self.weights = {**dict.fromkeys(self.rewards, 1.0), **self._checked_weights(weights or {})}
        self.accuracy_key = self._checked_accuracy_key(accuracy_key)
        self.on_error = on_error

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> RewardScores:
        """Score ``N`` responses.

        Args:
            prompts: [N] prompt texts.
            completions: [N] response texts.
            completion_ids: [N] response ids.
            columns: One list of ``N`` values per data set column.

        Raises:
            ValueError: If lengths differ, or a component misbehaves; the message names it.
        """
        inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        for name, values in inputs.items():
            if len(values) != len(completions):
                raise ValueError(f"{name} must have one value per completion ({len(completions)}), got {len(values)}")
        results = {name: self._run(name, inputs) for name in self.rewards}
        components = {name: _column([_score(row) for row in rows]) for name, rows in results.items()}
        reward = torch.zeros(len(completions), dtype=torch.float64)
        for name, scores in components.items():
            reward += self.weights[name] * scores.double().nan_to_num(nan=0.0)
        return RewardScores(
            accuracy=_column([_accuracy(row) for row in results[self.accuracy_key]]),
            reward=reward.float(),
            components=components,
            results=results,
            statuses={name: dict(Counter(map(_status, rows))) for name, rows in results.items()},
        )

    def _run(self, name: str, inputs: Mapping[str, Sequence[Any]]) -> list[Row]:
        """Call one component and check what it returns."""
        num_rows = len(inputs["completions"])
        arguments = accepted_inputs(name, self.rewards[name], inputs)
        try:
            returned = self.rewards[name](**arguments)
        # A user's function may raise anything; what it raised is kept as the cause.
        except Exception as error:
            message = f"reward {name!r} raised {type(error).__name__}: {error}"
            if self.on_error == "raise":
                raise ValueError(
                    f"{message}; fix it, or set on_error to 'zero' to count such responses as wrong"
                ) from error
            _logger.warning("%s; its %d responses are scored 0", message, num_rows)
            return [_failed(message)] * num_rows
        rows = score_list(name, returned, num_rows)
        return [self._checked_row(name, index, row) for index, row in enumerate(rows)]

    def _checked_row(self, name: str, index: int, row: object) -> Row:
        if row is None or isinstance(row, RewardResult):
            return row
        try:
            if isinstance(row, (str, bytes)):
                raise TypeError
            score = float(row)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError):
            kind = type(row).__name__
            raise ValueError(
                f"reward {name!r} must return a number, None or a RewardResult for each response, "
                f"got {row!r} ({kind}) at index {index}"
            ) from None
        if abs(score) <= _LARGEST:
            return score
        message = f"reward {name!r} must return finite numbers, got {score} at index {index}"
        if self.on_error == "raise":
            raise ValueError(f"{message}; return None where it does not apply, or set on_error to 'zero'")
        _logger.warning("%s; scored 0", message)
        return _failed(message)

    def _checked_weights(self, weights: Mapping[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if name not in self.rewards:
                raise ValueError(f"weights names {name!r}, which is no reward; {nearest_name(name, self.rewards)}")
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ValueError(f"weights[{name!r}] must be a finite number, got {weight!r}")
        return {name: float(weight) for name, weight in weights.items()}

    def _checked_accuracy_key(self, accuracy_key: str | None) -> str:
        if accuracy_key is None and len(self.rewards) == 1:
            return next(iter(self.rewards))
        if accuracy_key is None:
            raise ValueError(
                f"accuracy_key must say which of the rewards {sorted(self.rewards)} measures correctness, got None; "
                "group filters read it"
            )
        if accuracy_key not in self.rewards:
            raise ValueError(
                f"accuracy_key must name a reward, got {accuracy_key!r}; {nearest_name(accuracy_key, self.rewards)}"
            )
        return accuracy_key


def _failed(message: str) -> RewardResult:
    return RewardResult(score=0.0, correct=False, status="error", error=message)


def _score(row: Row) -> float:
    if row is None:
        return math.nan
    return row.score if isinstance(row, RewardResult) else row


def _accuracy(row: Row) -> float:
    return float(row.correct) if isinstance(row, RewardResult) else _score(row)


def _status(row: Row) -> str:
    if row is None:
        return "not_applicable"
    return row.status if isinstance(row, RewardResult) else "ok"


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
