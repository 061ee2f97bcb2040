"""What both sides of a whole-step comparison share: the work, the reward and the stopwatch. Standard library only."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Work:
    """One training run of equal steps: sample ``num_prompts * group_size`` responses, then one optimizer step on them.

    The folder ``model`` names an EOS outside the model's vocabulary, so every response has ``response_length`` tokens.
    """

    model: str
    prompts_file: str
    output_dir: str
    num_steps: int
    num_prompts: int = 8
    group_size: int = 8
    prompt_length: int = 45
    response_length: int = 24
    responses_per_micro_batch: int = 16
    activation_checkpointing: bool = False
    lr: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_responses % self.responses_per_micro_batch or self.responses_per_micro_batch % self.group_size:
            raise ValueError(
                f"responses_per_micro_batch must divide {self.num_responses} and be a multiple of "
                f"group_size={self.group_size}, got {self.responses_per_micro_batch}"
            )

    @property
    def num_responses(self) -> int:
        """Responses of a step."""
        return self.num_prompts * self.group_size

    @classmethod
    def read(cls, path: str | Path) -> Work:
        return cls(**json.loads(Path(path).read_text("utf-8")))

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def prompts(self) -> list[str]:
        return [json.loads(line)["problem"] for line in Path(self.prompts_file).read_text("utf-8").splitlines()]


def vowel_share(completions: list[str], **columns: Any) -> list[float]:
    """A reward that costs next to nothing and differs from response to response."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def resident_mib(line: str) -> float:
    """A line of Linux's account of this process; unlike ``ru_maxrss`` it knows nothing of the parent's memory."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(entry.split()[1]) / 1024 for entry in lines if entry.startswith(line))


@dataclass
class StepLog:
    """Seconds and memory at the end of each step; a step lasts from one :meth:`mark` to the next."""

    marks: list[dict[str, float]] = field(default_factory=list)
    generate_seconds: float = 0.0
    setup_mib: float = 0.0

    def start(self) -> None:
        self.setup_mib = resident_mib("VmHWM")
        self.mark()

    def mark(self) -> None:
        self.marks.append(
            {
                "wall": time.perf_counter(),
                "processor": time.process_time(),
                "generate": self.generate_seconds,
                "peak_mib": resident_mib("VmHWM"),
            }
        )

    def timing_generation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what samples, so that its share is known."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.generate_seconds += time.perf_counter() - start

        return timed

    def write(self, path: str | Path, **facts: Any) -> None:
        """Store the seconds of each step and whatever else the side knows."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        seconds = {
            name: [after[name] - before[name] for before, after in pairs] for name in ("wall", "processor", "generate")
        }
        result = {
            **seconds,
            "peak_mib": self.marks[-1]["peak_mib"],
            "setup_mib": self.setup_mib,
            "load": os.getloadavg()[0],
            **facts,
        }
        Path(path).write_text(json.dumps(result), encoding="utf-8")
