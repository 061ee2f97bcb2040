"""Turning the names a person writes in a config into objects, with errors that point at the nearest right name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


def nearest_name(name: str, options: Iterable[str]) -> str:
    """Return ``"did you mean 'x'? "`` for the closest option, or an empty string, followed by what exists.

    Example:
        >>> nearest_name("anwser", ["problem", "answer"])
        "did you mean 'answer'? Available: answer, problem"
        >>> nearest_name("zzz", ["problem", "answer"])
        'available: answer, problem'
    """
    known = sorted(map(str, options))
    close = closest_name(name, known)
    listing = ", ".join(known) if known else "nothing"
    return f"did you mean {close!r}? Available: {listing}" if close else f"available: {listing}"


def closest_name(name: str, options: Iterable[str]) -> str | None:
    """Return the option that ``name`` may be a misspelling of, whatever its case, or None.

    Example:
        >>> closest_name("Anwser", ["problem", "answer"])
        'answer'
    """
    folded = {str(option).lower(): str(option) for option in options}
    close = difflib.get_close_matches(str(name).lower(), list(folded), n=1, cutoff=0.5)
    return folded[close[0]] if close else None


def import_object(path: str) -> Any:
    """Import what ``"package.module:name"`` names; ``"package.module.name"`` works too.

    Args:
        path: Dotted module, a colon, and a name in it (dots for attributes of attributes).

    Raises:
        ValueError: If the form is wrong, the module does not import, or it has no such name.

    Example:
        >>> import_object("math:sqrt")(9.0)
        3.0
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise ValueError(f"an import path must look like 'package.module:name', got {path!r}")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"cannot import {module_name!r} for {path!r}: {error}; it must be installed or lie in the working directory"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            public = [option for option in dir(found) if not option.startswith("_")]
            raise ValueError(f"{module_name!r} has no {name!r} (from {path!r}); {_short(nearest_name(name, public))}")
        found = getattr(found, name)
    return found


def _short(text: str, limit: int = 300) -> str:
    """Keep a listing of a big module readable."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
