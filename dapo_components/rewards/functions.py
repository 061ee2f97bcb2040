"""Reward functions: finding them by name, giving them the inputs they take, checking the form of what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from dapo_components.data.names import import_object, nearest_name
from dapo_components.rewards.result import RewardResult
from dapo_components.training.config import COMPONENT, build

Row = float | RewardResult | None
RewardFunction = Callable[..., Sequence[Row]]
"""``fn(prompts=..., completions=..., completion_ids=..., **columns)``, the shape of TRL's reward functions."""


def resolve_reward(name: str, reward: RewardFunction | str | Mapping[str, Any]) -> RewardFunction:
    """Return the callable that a config names.

    Raises:
        ValueError: If it does not exist or cannot be called.
    """
    if isinstance(reward, str):
        found: Any = import_object(reward)
    elif isinstance(reward, Mapping) and COMPONENT in reward:
        found = build(reward)
    else:
        found = reward
    if inspect.isclass(found):
        raise ValueError(
            f"reward {name!r} must be a function or an instance, got the class {found.__name__}; use {COMPONENT}"
        )
    if not callable(found):
        raise ValueError(
            f"reward {name!r} must be callable, an import path or a mapping with {COMPONENT}, got {reward!r}"
        )
    return cast(RewardFunction, found)


def accepted_inputs(
    name: str, function: Callable[..., Any], inputs: Mapping[str, Sequence[Any]]
) -> dict[str, Sequence[Any]]:
    """Return the inputs that a function takes: all of them, or by name if it has no ``**columns``.

    Raises:
        ValueError: If the function needs a column that is not there.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return dict(inputs)
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in inputs
    ]
    if missing:
        raise ValueError(
            f"reward {name!r} needs the column {missing[0]!r}, which the data set does not give; "
            f"{nearest_name(missing[0], inputs)}; map it in the data set's columns"
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(inputs)
    names = {parameter.name for parameter in parameters}
    return {key: values for key, values in inputs.items() if key in names}


def score_list(name: str, returned: object, num_rows: int) -> list[Any]:
    """Return the scores as a list of the right length.

    Raises:
        ValueError: If they are no list of one score per response.
    """
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise ValueError(f"reward {name!r} must be a plain function, got an async one; wrap it with asyncio.run")
    if isinstance(returned, Tensor):
        returned = returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__iter__"):
        kind = type(returned).__name__
        raise ValueError(f"reward {name!r} must return a list with one score per completion, got {returned!r} ({kind})")
    rows = list(returned)  # pyright: ignore[reportArgumentType]
    if len(rows) != num_rows:
        raise ValueError(f"reward {name!r} must return one score per completion ({num_rows}), got {len(rows)}")
    return rows
