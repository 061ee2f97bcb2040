"""One JSON object per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from dapo_components.reporting.jsonl import StepFile, read_rows


@final
class MetricsLog:
    """Write ``metrics.jsonl``.

    Args:
        path: The file; its folder is created.
        resume_step: Optimizer steps done so far, 0 for a new run: rows of later steps are dropped, because the run
            repeats them. ``None`` refuses a file that holds rows.

    Raises:
        ValueError: If the file holds rows and ``resume_step`` is None.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = MetricsLog(folder + "/metrics.jsonl")
        ...     log.log(1, {"loss": 0.5})
        ...     list(read_metrics(folder + "/metrics.jsonl"))
        [{'step': 1, 'loss': 0.5}]
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        if resume_step is None and Path(path).exists() and Path(path).stat().st_size > 0:
            raise ValueError(
                f"path {str(path)!r} holds the metrics of another run; give resume_step to continue it, "
                "or choose a new folder"
            )
        self._file = StepFile(path, resume_step=resume_step)
        self._last_step = resume_step or 0

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the row of one optimizer step.

        Args:
            step: Optimizer step, counted from 1; larger than that of the row before.
            metrics: Name -> number (or text); numbers that are not finite are written as null.

        Raises:
            ValueError: If ``step`` does not increase, or a metric is called ``step``.
        """
        if step <= self._last_step:
            raise ValueError(f"step must be > {self._last_step}, the last one logged, got {step}")
        if "step" in metrics:
            raise ValueError(
                f"metrics must not have a metric called 'step', which is the row's own, got {metrics['step']!r}"
            )
        self._file.append([{"step": step, **metrics}])
        self._last_step = step


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file; an incomplete last line is left out.

    Raises:
        ValueError: If the file does not exist or a line is malformed.

    Example:
        >>> rewards = [row["reward"] for row in read_metrics("runs/demo/metrics.jsonl")]  # doctest: +SKIP
    """
    return read_rows(path)
