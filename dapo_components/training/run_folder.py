"""The output folder of a run: refuses to mix two runs, and says what changed on resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_components.training.config import ConfigError

CONFIG_FILE = "config.json"
SUMMARY_FILE = "run_summary.json"
_FREE_TO_CHANGE = ("resume", "dry_run", "num_steps", "output_dir")


def open_run_folder(folder: str | Path, *, resume: bool, config: Mapping[str, Any]) -> list[str]:
    """Make or re-open the folder of a run and store its config.

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
        stored.write_text(json.dumps(plain, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error}") from error
    before, after = _flatten(before), _flatten(plain)
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in _FREE_TO_CHANGE
    ]


def write_run_summary(
    folder: str | Path,
    *,
    seed: int,
    num_steps: int,
    num_updates: int,
    seconds: float,
    stop_reason: str,
    evaluations: Mapping[int, Mapping[str, float]],
    checkpoint: Path | None,
) -> Path:
    """Write ``run_summary.json`` and say where it is.

    Args:
        folder: Output folder of the run.
        seed: Seed of the run.
        num_steps: Rollout steps done.
        num_updates: Optimizer steps done.
        seconds: Wall time of training and evaluation, over all parts of a resumed run.
        stop_reason: ``finished``, ``interrupted`` or ``exhausted``.
        evaluations: Scores by rollout step; the ``mean@k`` of the first and the last become ``accuracy_before`` and
            ``accuracy_after``.
        checkpoint: The newest checkpoint.

    Returns:
        The file.
    """
    means = [value for _, scores in sorted(evaluations.items()) for name, value in scores.items() if _is_mean(name)]
    summary = {
        "accuracy_before": means[0] if means else None,
        "accuracy_after": means[-1] if means else None,
        "num_steps": num_steps,
        "num_updates": num_updates,
        "seconds": round(seconds, 1),
        "stop_reason": stop_reason,
        "seed": seed,
        "evaluations": {str(step): dict(scores) for step, scores in sorted(evaluations.items())},
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }
    path = Path(folder) / SUMMARY_FILE
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{stop_reason} after {num_steps} steps: summary in {path}, checkpoint in {checkpoint}", flush=True)
    return path


def _is_mean(name: str) -> bool:
    return name.startswith("mean@") and not name.endswith("stderr")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat
