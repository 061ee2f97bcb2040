"""Configs that are checked before anything is built: unknown keys, wrong types, components that do not exist.

A recipe states its keys, types and defaults in one dataclass. A component is a mapping with ``_component_``, the dotted
path of a class or function, beside its arguments; components nest.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dapo_components.data.names import closest_name

COMPONENT = "_component_"
Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """A config that cannot be run as written; the message names the key, the rule and the value."""


def parse_config(values: Mapping[str, Any], schema: type[Schema], *, prefix: str = "") -> Schema:
    """Turn a mapping into an instance of the dataclass ``schema``.

    Args:
        values: Plain values, as from YAML; interpolations already resolved.
        schema: Dataclass whose fields are the allowed keys. Fields without a default are required; a field that is a
            dataclass takes a mapping.
        prefix: Written before the keys in messages.

    Returns:
        The dataclass, its fields holding values of the annotated types.

    Raises:
        ConfigError: For an unknown key (with the nearest known one), a missing key, a wrong type, or a component whose
            path or arguments do not exist. All faults are listed at once.

    Example:
        >>> @dataclasses.dataclass
        ... class Config:
        ...     num_steps: int
        ...     seed: int = 0
        >>> parse_config({"num_steps": 3}, Config)
        Config(num_steps=3, seed=0)
        >>> parse_config({"num_step": 3}, Config)
        Traceback (most recent call last):
        dapo_components.training.config.ConfigError: unknown config key 'num_step'; did you mean 'num_steps'?
        missing config key 'num_steps' (int)
    """
    try:
        hints = typing.get_type_hints(schema)
    except NameError as error:
        raise ConfigError(
            f"the types of {schema.__name__} cannot be read ({error}): `tune run` does not register a recipe as a "
            "module, so the file that defines it must not have `from __future__ import annotations`"
        ) from error
    fields = {field.name: field for field in dataclasses.fields(schema)}  # pyright: ignore[reportArgumentType]
    faults = [
        f"unknown config key {f'{prefix}{key}'!r}{nearest(str(key), fields)}" for key in values if key not in fields
    ]
    # torchtune writes the override `soft_overlong=null` into the component: {"_component_": None, ...}.
    values = {key: None if _is_null_component(value) else value for key, value in values.items()}
    accepted: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            try:
                accepted[name] = _check_type(values[name], hints[name], prefix + name)
            except ConfigError as error:
                faults.append(str(error))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.append(f"missing config key {prefix + name!r} ({_type_name(hints[name])})")
    faults += [fault for name, value in accepted.items() for fault in component_faults(value, prefix + name)]
    if faults:
        raise ConfigError("\n".join(faults))
    return schema(**accepted)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    close = closest_name(name, known)
    return f"; did you mean {close!r}?" if close else ""


def check_at_least(values: object, minimum: int, *names: str) -> None:
    """Refuse attributes below ``minimum``.

    Raises:
        ConfigError: For the first that is.
    """
    for name in names:
        if getattr(values, name) < minimum:
            raise ConfigError(f"config key {name!r} must be >= {minimum}, got {getattr(values, name)}")


def check_positive(values: object, *names: str) -> None:
    """Refuse attributes that are not above 0 and finite.

    Raises:
        ConfigError: For the first that is not.
    """
    for name in names:
        if not 0 < getattr(values, name) < math.inf:
            raise ConfigError(f"config key {name!r} must be > 0 and finite, got {getattr(values, name)}")


def locate(path: str) -> Callable[..., Any]:
    """Import the object at a dotted path.

    Raises:
        ConfigError: If no prefix of the path is a module, or the attribute does not exist; the message keeps the
            import error, which names a missing package.

    Example:
        >>> locate("math.sqrt")(9.0)
        3.0
    """
    if not isinstance(path, str) or not all(path.split(".")):
        raise ConfigError(f"{COMPONENT} must be a dotted path such as 'package.module.Name', got {path!r}")
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and not f"{name}.".startswith(f"{error.name}."):
                raise ConfigError(f"{COMPONENT} {path!r} cannot be imported: {error}") from error
            continue
        for attribute in parts[count:]:
            if not hasattr(found, attribute):
                raise ConfigError(f"{COMPONENT} {path!r}: {name} has no {attribute!r}{nearest(attribute, dir(found))}")
            found = getattr(found, attribute)
        return found
    raise ConfigError(f"{COMPONENT} {path!r} cannot be imported: there is no module {parts[0]!r}")


def component_faults(value: Any, where: str) -> list[str]:
    """List what is wrong with the components in ``value``, without building them."""
    if isinstance(value, Mapping):
        faults = [fault for key, child in value.items() for fault in component_faults(child, f"{where}.{key}")]
        return faults + (_own_faults(value, where) if COMPONENT in value else [])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [fault for number, child in enumerate(value) for fault in component_faults(child, f"{where}[{number}]")]
    return []


def build(node: Mapping[str, Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Build the component that ``node`` describes, nested components first.

    Args:
        node: Mapping with ``_component_`` and keyword arguments, or None.
        *args: Positional arguments that the caller adds.
        **kwargs: Keyword arguments that the caller adds; they override the node's.

    Returns:
        The built object; None for None.

    Raises:
        ConfigError: If the component does not exist or refuses its arguments.

    Example:
        >>> build({"_component_": "fractions.Fraction", "numerator": 1, "denominator": 3})
        Fraction(1, 3)
    """
    if node is None:
        return None
    if COMPONENT not in node:
        raise ConfigError(f"a component needs the key {COMPONENT!r}, got the keys {sorted(node)}")
    path = node[COMPONENT]
    arguments = {key: _build_nested(value) for key, value in node.items() if key != COMPONENT}
    target = locate(path)
    merged = {**arguments, **kwargs}
    try:
        inspect.signature(target).bind(*args, **merged)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}; given {sorted(merged)}") from None
    except ValueError:
        pass  # builtins without a signature
    try:
        return target(*args, **merged)
    except (TypeError, AttributeError, ArithmeticError, AssertionError) as error:
        # What a constructor that does not check its arguments does with a wrong one.
        raise ConfigError(f"{path} cannot be built with {arguments}: {type(error).__name__}: {error}") from error


def _is_null_component(value: Any) -> bool:
    return isinstance(value, Mapping) and COMPONENT in value and value[COMPONENT] is None


def _build_nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return build(value) if COMPONENT in value else {key: _build_nested(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_build_nested(child) for child in value]
    return value


def _own_faults(node: Mapping[str, Any], where: str) -> list[str]:
    try:
        target = locate(node[COMPONENT])
        parameters = inspect.signature(target).parameters
    except ConfigError as error:
        return [f"{where}: {error}"]
    except (TypeError, ValueError):
        return []
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    unknown = [key for key in node if key != COMPONENT and key not in parameters]
    return [f"{where}: {node[COMPONENT]} has no argument {key!r}{nearest(key, parameters)}" for key in unknown]


def _check_type(value: Any, hint: Any, name: str) -> Any:
    """Return ``value`` as the hinted type; int is fine for float, bool is not a number."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        nested = [option for option in options if dataclasses.is_dataclass(option)]
        if nested and isinstance(value, Mapping):
            return _check_type(value, nested[0], name)
        for option in options:
            try:
                return _check_type(value, option, name)
            except ConfigError:
                continue
    elif origin is typing.Literal:
        if value in typing.get_args(hint):
            return value
        allowed = ", ".join(map(str, typing.get_args(hint)))
        raise ConfigError(f"config key {name!r} must be one of {allowed}, got {value!r}")
    elif origin is list and isinstance(value, list):
        (item,) = typing.get_args(hint)
        return [_check_type(child, item, f"{name}[{number}]") for number, child in enumerate(value)]
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return parse_config(value, hint, prefix=f"{name}.")
    elif hint is Any or (hint is type(None) and value is None):
        return value
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    else:
        expected: Any = origin or hint
        if isinstance(value, expected) and (expected is bool or not isinstance(value, bool)):
            return value
    raise ConfigError(f"config key {name!r} must be {_type_name(hint)}, got {value!r} ({type(value).__name__})")


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(option) for option in typing.get_args(hint))
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))
