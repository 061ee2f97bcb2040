"""The output folder of a run: refuses to mix two runs, and says what changed on resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_components.training.config import ConfigError

CONFIG_FILE = "config.json"
_FREE_TO_CHANGE = ("resume", "dry_run", "num_steps", "output_dir")


def open_run_folder(folder: str | Path, *, resume: bool, config: Mapping[str, Any]) -> list[str]:
    """Make or re-open the folder of a run; it becomes this run's with :func:`store_config`.

    Args:
        folder: Output folder.
        resume: Whether to continue the run that is there.
        config: Plain values of the run's config.

    Returns:
        One line per key whose value differs from the stored run's, to be shown to the user.

    Raises:
        ConfigError: If the folder holds a run and ``resume`` is false, or the folder cannot be made.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "run"
        >>> open_run_folder(folder, resume=False, config={"seed": 0})
        []
        >>> store_config(folder, {"seed": 0})
        >>> open_run_folder(folder, resume=True, config={"seed": 1})
        ['seed: 0 -> 1']
    """
    folder = Path(folder)
    stored = folder / CONFIG_FILE
    if stored.exists() and not resume:
        raise ConfigError(
            f"output_dir={folder} already holds a run; add resume=true to continue it, or choose another output_dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plain = json.loads(json.dumps(config, default=str))
        before = json.loads(stored.read_text()) if stored.exists() else plain
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be used: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"output_dir={folder} cannot be used: {stored} is damaged ({error}); remove it to resume anyway"
        ) from error
    before, after = _flatten(before), _flatten(plain)
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in _FREE_TO_CHANGE
    ]


def store_config(folder: str | Path, config: Mapping[str, Any], *, rank: int = 0) -> None:
    """Mark a folder as a run's, once everything is built: a run that could not start does not block the folder.

    Args:
        folder: Output folder.
        config: Plain values of the run's config.
        rank: This process; only rank 0 writes.
    """
    if rank > 0:
        return
    partial = Path(folder) / f".{CONFIG_FILE}.partial"
    partial.write_text(json.dumps(config, indent=1, default=str) + "\n")
    partial.replace(Path(folder) / CONFIG_FILE)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat
