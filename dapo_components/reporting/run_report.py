"""Everything a run shows and leaves behind: progress bar, metrics, rollouts, evaluations, summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from dapo_components.reporting.metrics_log import MetricsLog
from dapo_components.reporting.rollout_log import RolloutLog

if TYPE_CHECKING:
    from filelock import BaseFileLock

SUMMARY_FILE = "run_summary.json"
LOCK_FILE = ".run.lock"


class MetricLogger(Protocol):
    """What torchtune's metric loggers (disk, TensorBoard, W&B, ...) offer."""

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Log several scalars."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


@final
class RunReport:
    """Write a run's files and its progress bar; ranks other than 0 write only their rollouts.

    Files in ``folder``: ``metrics.jsonl`` (one object per optimizer step), ``rollouts_rank<r>.jsonl`` (one per
    response), ``run_summary.json``.

    Args:
        folder: Output folder of the run.
        step: Rollout steps done so far; rows of later steps, which a resumed run repeats, are dropped.
        num_steps: Rollout steps in all.
        num_updates: Optimizer steps done so far.
        rank: This process.
        log_rollouts: Whether to write responses.
        max_logged_rollouts: Most responses written per step and rank; None writes all.
        metric_logger: Receives the same metrics; None for none.

    Raises:
        ValueError: If another run that has not ended writes into ``folder``.

    Example:
        >>> import tempfile
        >>> report = RunReport(tempfile.mkdtemp(), step=0, num_steps=1, num_updates=0)
        >>> rollout = {"reward": 0.5, "completions/mean_length": 12.0, "tokens_per_second": 100.0}
        >>> report.step_done([{"policy_loss": 0.1}], rollout, num_updates=1)
        >>> sorted(path.name for path in report.folder.glob("*.jsonl"))
        ['metrics.jsonl']
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        step: int,
        num_steps: int,
        num_updates: int,
        rank: int = 0,
        log_rollouts: bool = True,
        max_logged_rollouts: int | None = None,
        metric_logger: MetricLogger | None = None,
    ) -> None:
        from tqdm import tqdm

        self.folder = Path(folder)
        self.rank = rank
        self._lock = _lock(self.folder) if rank == 0 else None
        self.metric_logger = metric_logger
        self.step = step
        rollouts = self.folder / f"rollouts_rank{rank}.jsonl"
        self._rollout_log = (
            RolloutLog(rollouts, resume_step=step, max_per_step=max_logged_rollouts) if log_rollouts else None
        )
        self._metrics_log = MetricsLog(self.folder / "metrics.jsonl", resume_step=num_updates) if rank == 0 else None
        self._bar = tqdm(total=num_steps, initial=step, unit="step", disable=rank > 0)

    def rollouts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the responses of one group of the step in progress."""
        if self._rollout_log:
            self._rollout_log.write(rows, step=self.step + 1)

    def step_done(
        self, updates: Sequence[Mapping[str, float]], rollout: Mapping[str, float], *, num_updates: int
    ) -> None:
        """Log a rollout step: one object per optimizer step, the rollout's own numbers in each.

        Args:
            updates: Metrics of its optimizer steps, in order.
            rollout: Metrics of the rollout.
            num_updates: Optimizer steps done, these included.
        """
        self.step += 1
        if self._metrics_log is None:
            return
        for number, update in enumerate(updates, start=num_updates - len(updates) + 1):
            row = {"rollout_step": self.step, **update, **rollout}
            self._metrics_log.log(number, row)
            if self.metric_logger:
                self.metric_logger.log_dict(row, number)
        self._bar.update()
        self._bar.set_postfix_str(
            f"reward {rollout['reward']:.2f}, accuracy {rollout.get('sampling/accuracy', float('nan')):.2f}, "
            f"kept {rollout.get('sampling/kept_share', float('nan')):.2f}, "
            f"length {rollout['completions/mean_length']:.0f}, {rollout['tokens_per_second']:.0f} tokens/s"
        )

    def evaluation(self, scores: Mapping[str, float]) -> None:
        """Show and log an evaluation."""
        if self.rank > 0:
            return
        shown = ", ".join(f"{name} {value:.3f}" for name, value in scores.items() if not name.endswith("_stderr"))
        self._bar.write(f"held-out accuracy after {self.step} steps: {shown}")
        if self.metric_logger:
            self.metric_logger.log_dict({f"evaluation/{name}": value for name, value in scores.items()}, self.step)

    def close(self, *, evaluations: Mapping[int, Mapping[str, float]], **facts: Any) -> None:
        """Write the summary and close everything.

        Args:
            evaluations: Scores by rollout step; the ``mean@k`` at step 0 becomes ``accuracy_before``, that of the last
                later step ``accuracy_after``. Each is null if it was not measured.
            facts: Whatever else belongs in the summary.
        """
        self._bar.close()
        if self.rank > 0:
            return
        means = {
            step: value for step, row in sorted(evaluations.items()) for name, value in row.items() if _is_mean(name)
        }
        later = [step for step in means if step > 0]
        summary = {
            "accuracy_before": means.get(0),
            "accuracy_after": means[later[-1]] if later else None,
            "num_steps": self.step,
            **facts,
            "evaluations": {str(step): dict(evaluations[step]) for step in sorted(evaluations)},
        }
        path = self.folder / SUMMARY_FILE
        path.write_text(json.dumps(summary, indent=1, default=str) + "\n")
        print(f"{facts.get('stop_reason', 'stopped')} after {self.step} steps; summary in {path}", flush=True)
        if self.metric_logger:
            self.metric_logger.close()
        if self._lock:
            self._lock.release()


def _lock(folder: Path) -> BaseFileLock:
    """Keep a second run out of the folder; the system lifts the lock if this process dies."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"output_dir={str(folder)!r} is in use by another run; wait until that one has ended, "
            "or choose another output_dir"
        ) from error
    return lock


def _is_mean(name: str) -> bool:
    return name.startswith("mean@") and not name.endswith("_stderr")
