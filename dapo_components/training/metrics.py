"""Metrics that are right over micro-batches and ranks: sums and counts are reduced, never means of means."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import final

import torch
from tensordict import TensorDictBase
from torch import Tensor

from dapo_components.training.distributed import all_gather, all_reduce_maxima, all_reduce_sum


@final
class MetricSums:
    """Collect the numbers of one optimizer step and reduce them over ranks.

    Example:
        >>> metrics = MetricSums()
        >>> metrics.mean("reward", torch.tensor([1.0, 3.0]))
        >>> metrics.mean("reward", torch.tensor([5.0]))
        >>> metrics.reduce()
        {'reward': 3.0}
    """

    def __init__(self) -> None:
        self._totals: dict[str, Tensor | float] = {}
        self._counts: dict[str, Tensor | float] = {}
        self._maxima: dict[str, Tensor | float] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add values to a mean over everything added under ``name`` on all ranks, where ``mask`` is True."""
        kept = values if mask is None else values[mask]
        self.sum(name, kept.detach().sum(dtype=torch.float64))
        self._counts[name] = self._counts.get(name, 0) + kept.numel()

    def sum(self, name: str, value: Tensor | float) -> None:
        """Add to a plain sum, which is also right for shares of a global count."""
        self._totals[name] = self._totals.get(name, 0) + value

    def add_shares(self, values: Mapping[str, Tensor], reduced_by_max: Collection[str] = ()) -> None:
        """Add what a loss measured: parts of whole-step numbers that add up, and those that reduce by maximum."""
        for name, value in values.items():
            (self.maximum if name in reduced_by_max else self.sum)(name, value)

    def maximum(self, name: str, value: Tensor | float) -> None:
        """Keep the largest value."""
        new = torch.as_tensor(value)
        self._maxima[name] = torch.maximum(torch.as_tensor(self._maxima[name]), new) if name in self._maxima else new

    def reduce(self) -> dict[str, float]:
        """Return all metrics over all ranks; a mean over nothing is left out."""
        # A rank without work for this step lacks names that others have; adding 0 (or -inf) changes nothing.
        collected = (self._totals, self._counts, self._maxima)
        every_rank = zip(*all_gather(tuple(map(set, collected))), strict=True)
        names = [sorted(set().union(*sets)) for sets in every_rank]
        totals = all_reduce_sum({name: self._totals.get(name, 0.0) for name in names[0]})
        counts = all_reduce_sum({name: self._counts.get(name, 0) for name in names[1]})
        maxima = all_reduce_maxima({name: self._maxima.get(name, -math.inf) for name in names[2]})
        values = {name: total if name not in counts else total / counts[name] for name, total in totals.items()}
        empty = {name for name, count in counts.items() if count == 0}
        return {name: float(value) for name, value in {**values, **maxima}.items() if name not in empty}


def add_rollout_metrics(metrics: MetricSums, batch: TensorDictBase) -> None:
    """Add what a batch ``[B, G]`` says about rewards, advantages and lengths, under TRL's names where it has them.

    Args:
        metrics: Where to add.
        batch: Holds ``reward``, ``advantage``, ``response_length``, ``truncated`` and ``response_mask``.
    """
    metrics.mean("reward", batch["reward"])
    metrics.mean("reward_std", batch["reward"].std(dim=-1, correction=min(1, batch.shape[1] - 1)))
    metrics.mean("advantage_abs_mean", batch["advantage"].abs())
    metrics.mean("completions/mean_length", batch["response_length"].double())
    metrics.mean("completions/clipped_ratio", batch["truncated"].double())
    metrics.sum("num_tokens", batch["response_mask"].sum())


def add_sampler_agreement(metrics: MetricSums, part: TensorDictBase, *, version: int) -> None:
    """Measure ``|old_log_prob - rollout_log_prob|`` over the tokens that the current weights sampled.

    Adds ``sampling/log_prob_diff_mean`` and ``sampling/log_prob_diff_max``, in nats.

    Args:
        metrics: Where to add.
        part: Rows with both log-probs, ``loss_mask`` and ``policy_version``.
        version: Policy version of ``old_log_prob``; rows of older versions differ for another reason.
    """
    mask = part["loss_mask"] & (part["policy_version"] == version)[..., None]
    difference = torch.where(mask, part["old_log_prob"] - part["rollout_log_prob"], 0.0).abs()
    metrics.mean("sampling/log_prob_diff_mean", difference, mask)
    if mask.any():
        metrics.maximum("sampling/log_prob_diff_max", difference.max())


@final
class Stopwatch:
    """Seconds between laps of one step.

    Example:
        >>> clock = Stopwatch()
        >>> clock.lap("time/generate")
        >>> list(clock.laps)
        ['time/generate']
    """

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Store the seconds since the last lap under ``name``."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
