"""Share of a step that is not model compute: collector, rewards, filter, advantage, packing, loss, logging.

    python -m benchmarks.bench_overhead recipes/configs/tiny_cpu.yaml        # after `make demo`
    python -m benchmarks.bench_overhead recipes/configs/smollm2_135m_cpu.yaml dataset.source=problems.jsonl

Runs a recipe's config as it is, without evaluation and checkpoints, and takes its steps apart. Model compute is what
happens inside the engine's ``step``, the policy's forward and backward passes, gradient clipping and the optimizer;
every other second of a step, the loss among them, counts as overhead.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_components.training import policy
from tests.recipes.recipe_runs import config_values, make, make_inputs, recipe_module

MODEL_COMPUTE = ("sampling", "forward", "backward", "optimizer")
Seconds = defaultdict[str, float]


class SelfTimes:
    """Seconds by part of a step; a part inside another counts for itself only."""

    def __init__(self) -> None:
        self.steps: list[Seconds] = []
        self._seconds: Seconds = defaultdict(float)
        self._open = ["rest"]
        self._since = time.perf_counter()
        self._restore: list[Callable[[], None]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    def timed_iterator(self, function: Callable[..., Iterator[Any]], name: str) -> Callable[..., Iterator[Any]]:
        @functools.wraps(function)
        def iterate(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items = function(*args, **kwargs)
            while True:
                with self.part(name):
                    item = next(items, items)
                if item is items:
                    return
                yield item

        return iterate

    def replace(self, owner: Any, attribute: str, name: str, wrap: Callable[..., Any] | None = None) -> None:
        """Time ``owner.attribute`` under ``name`` until :meth:`undo`."""
        original = getattr(owner, attribute)
        setattr(owner, attribute, (wrap or self.timed)(original, name))
        self._restore.append(lambda: setattr(owner, attribute, original))

    def end_step(self) -> None:
        self._charge()
        self.steps.append(self._seconds)
        self._seconds = defaultdict(float)

    def undo(self) -> None:
        for restore in reversed(self._restore):
            restore()

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


def instrument(recipe: Any, times: SelfTimes) -> None:
    """Put every part of the recipe's step under a name."""
    for module in (recipe_module(), policy):  # the recipe, and log-probs before the first of several updates
        times.replace(module, "packed_log_probs", "forward")
        times.replace(module, "micro_batches", "packing", times.timed_iterator)
    times.replace(recipe.generator, "step", "sampling")
    times.replace(torch.Tensor, "backward", "backward")
    times.replace(recipe.gradients, "clip", "optimizer")
    times.replace(recipe.optimizer, "step", "optimizer")
    times.replace(recipe.generator, "update_weights", "weights to the sampler")
    times.replace(recipe.collector, "collect", "collector")
    times.replace(recipe.collector.rollouts, "reward", "rewards")
    if recipe.collector.group_filter:
        times.replace(recipe.collector, "group_filter", "filter")
    times.replace(recipe, "shape_reward", "reward shaping")
    times.replace(recipe, "advantage", "advantage")
    times.replace(recipe, "loss", "loss")
    times.replace(recipe, "update", "update, the rest of it")
    times.replace(recipe.report, "rollouts", "logging")
    times.replace(recipe, "log_step", "logging")


def measure(values: dict[str, Any], *, warm_up: int, steps: int) -> list[Seconds]:
    """Run a config and return the seconds of each part of each counted step."""
    recipe = make(values | {"num_steps": warm_up + steps, "evaluation": None, "save_every": 0})
    recipe.setup()
    recipe.save_checkpoint = lambda: None
    times = SelfTimes()
    try:
        instrument(recipe, times)
        log_step = recipe.log_step

        def log_step_and_end(*args: Any) -> None:
            log_step(*args)
            times.end_step()

        recipe.log_step = log_step_and_end
        recipe.train()
    finally:
        times.undo()
        recipe.cleanup()
    return times.steps[warm_up:]


def summarise(steps: list[Seconds]) -> dict[str, Any]:
    """Medians: milliseconds of each part, of a step, and the share of what is not model compute."""
    names = sorted({name for step in steps for name in step})
    overhead = [sum(seconds for name, seconds in step.items() if name not in MODEL_COMPUTE) for step in steps]
    return {
        "step_ms": 1000 * statistics.median(sum(step.values()) for step in steps),
        "overhead_ms": 1000 * statistics.median(overhead),
        "overhead_share": statistics.median(
            seconds / sum(step.values()) for seconds, step in zip(overhead, steps, strict=True)
        ),
        "parts_ms": {name: 1000 * statistics.median(step[name] for step in steps) for name in names},
    }


def main() -> None:
    from omegaconf import OmegaConf

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--warm-up", type=int, default=2, help="first steps, not counted")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = OmegaConf.from_dotlist([*arguments.overrides, f"output_dir={folder}/run"])
        merged = OmegaConf.merge(OmegaConf.load(arguments.config), overrides)
        values: Any = OmegaConf.to_container(merged, resolve=True)
        loads = [os.getloadavg()[0]]
        steps = measure(values, warm_up=arguments.warm_up, steps=arguments.steps)
    loads.append(os.getloadavg()[0])
    result = summarise(steps) | {"threads": torch.get_num_threads(), "load": loads}
    for name, milliseconds in sorted(result["parts_ms"].items(), key=lambda item: -item[1]):
        kind = "model" if name in MODEL_COMPUTE else ""
        print(f"{name:24} {milliseconds:10.2f} ms {100 * milliseconds / result['step_ms']:6.2f} % {kind}")
    print(
        f"step {result['step_ms']:.1f} ms, not model compute {result['overhead_ms']:.1f} ms = "
        f"{100 * result['overhead_share']:.2f} %; {result['threads']} threads, "
        f"load average {loads[0]:.1f} to {loads[1]:.1f}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@pytest.mark.benchmark(group="steps of a tiny model taken apart, set-up included")
def test_share_of_overhead(benchmark: Any, tmp_path: Path) -> None:
    values = config_values(make_inputs(tmp_path), tmp_path / "run")
    start = time.perf_counter()
    steps = benchmark.pedantic(measure, args=(values,), kwargs={"warm_up": 0, "steps": 2}, rounds=1)
    elapsed = time.perf_counter() - start
    result = summarise(steps)
    benchmark.extra_info.update(result)
    assert sum(sum(step.values()) for step in steps) < elapsed
    # A part that was renamed would show as another's time.
    assert {*MODEL_COMPUTE, "packing", "rewards", "filter", "advantage", "loss", "logging"} <= result["parts_ms"].keys()


if __name__ == "__main__":
    main()
