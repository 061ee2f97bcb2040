"""One JSON object per response: what was asked, what came back, what it scored, and whether it was used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from dapo_components.reporting.jsonl import StepFile, read_rows

ROLLOUT_FIELDS: dict[str, str] = {
    "step": "rollout step",
    "prompt_id": "index of the prompt in the data set",
    "group_id": "unique per draw of a prompt",
    "sample_id": "index of the response in its group",
    "prompt": "prompt as the model saw it",
    "response": "response text, special tokens removed",
    "answer": "right answer, null if the data set has none",
    "rewards": "each reward component before weighting, null where it does not apply",
    "reward": "weighted sum",
    "accuracy": "correctness before any shaping, null where it is not measured",
    "response_length": "response tokens, stop token included",
    "truncated": "whether the length limit ended it",
    "kept": "whether the group filter kept its group",
    "policy_version": "optimizer steps behind the weights that produced it",
}
"""Fields that every row has."""


@final
class RolloutLog:
    """Append rollouts to a JSON Lines file.

    Opening a file that a crash left with half a line repairs it.

    Args:
        path: The file; its folder is created.
        max_per_step: Rows written per step, at least; a call that begins below the limit is written whole, so that
            groups stay together. ``None`` writes all.
        resume_step: Drop rows of later steps, which a resumed run repeats; ``None`` keeps all.

    Attributes:
        num_skipped: Rows not written because of ``max_per_step``.

    Raises:
        ValueError: If ``max_per_step`` is below 1.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/rollouts.jsonl"
        >>> RolloutLog(path).write([dict.fromkeys(ROLLOUT_FIELDS, 0)], step=1)
        >>> [row["step"] for row in read_rollouts(path)]
        [1]
    """

    def __init__(self, path: str | Path, *, max_per_step: int | None = None, resume_step: int | None = None) -> None:
        if max_per_step is not None and max_per_step < 1:
            raise ValueError(f"max_per_step must be >= 1 or null, got {max_per_step}; switch the log off to write none")
        self.max_per_step = max_per_step
        self.num_skipped = 0
        self._file = StepFile(path, resume_step=resume_step)
        self._step: int | None = None
        self._num_in_step = 0

    def write(self, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Append responses, usually those of one group.

        Args:
            rows: One mapping per response with the fields of :data:`ROLLOUT_FIELDS` but ``step``; others are kept too.
            step: Rollout step.

        Raises:
            ValueError: If a row lacks a field.
        """
        for row in rows:
            missing = [name for name in ROLLOUT_FIELDS if name != "step" and name not in row]
            if missing:
                raise ValueError(
                    f"rows must have the fields of ROLLOUT_FIELDS, got one without {missing}: {sorted(row)}"
                )
        if step != self._step:
            self._step, self._num_in_step = step, 0
        if self.max_per_step is not None and self._num_in_step >= self.max_per_step:
            self.num_skipped += len(rows)
            return
        self._num_in_step += len(rows)
        self._file.append({**row, "step": step} for row in rows)


def read_rollouts(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a rollout log; an incomplete last line is left out.

    Raises:
        ValueError: If the file does not exist or a line is malformed.

    Example:
        >>> right = [row for row in read_rollouts("runs/demo/rollouts_rank0.jsonl")]  # doctest: +SKIP
    """
    return read_rows(path)
