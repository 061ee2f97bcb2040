"""Collecting on several ranks that go on together or stop together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from dapo_components.collectors.dynamic_sampling import DynamicSamplingCollector, DynamicSamplingExhausted
from dapo_components.collectors.rollout import GenerationFailed, RewardFailed, RolloutCollector
from dapo_components.data.prompts import Prompt
from dapo_components.training.distributed import all_gather

_REASONS = {
    DynamicSamplingExhausted: "exhausted",
    RewardFailed: "reward failed",
    GenerationFailed: "generation failed",
}


class CollectionFailed(RuntimeError):
    """A batch that at least one rank could not collect.

    Args:
        message: What happened, rank by rank.
        reason: ``exhausted``, ``reward failed`` or ``generation failed``.

    Attributes:
        weights_are_suspect: Whether a checkpoint of the current weights may be worthless: engines fail on weights that
            are not finite.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.weights_are_suspect = reason == _REASONS[GenerationFailed]


def evaluate_on_all_ranks(collector: RolloutCollector, prompts: Sequence[Prompt]) -> Tensor:
    """Score responses to held-out prompts. A collective: no rank is left waiting for one that failed.

    Seeds depend on the prompts alone, so every evaluation of a run uses the same ones.

    Args:
        collector: This rank's.
        prompts: This rank's share, which may be empty.

    Returns:
        Accuracy of all ranks' prompts, ``[B, k]``; 0 where the reward gives none.

    Raises:
        CollectionFailed: On every rank if any fails.

    Example:
        >>> accuracy = evaluate_on_all_ranks(collector, prompts)  # doctest: +SKIP
    """
    accuracy, failure = torch.zeros(0, collector.group_size), ("", "")
    try:
        if prompts:
            # Negative, so that no training group has the same id and seeds.
            accuracy = collector.collect(prompts, [-1 - prompt.prompt_id for prompt in prompts]).batch["accuracy"]
    except (GenerationFailed, RewardFailed) as error:
        failure = (_REASONS[type(error)], str(error))
    _raise_failures(failure)
    return torch.cat(all_gather(accuracy)).nan_to_num(0.0)


def collect_on_all_ranks(collector: DynamicSamplingCollector) -> TensorDict:
    """Collect this rank's share of a batch. A collective: no rank is left waiting for one that failed.

    Args:
        collector: This rank's.

    Returns:
        This rank's batch ``[B, G]``.

    Raises:
        CollectionFailed: On every rank if any fails. What the others had accepted waits for the next call.

    Example:
        >>> batch = collect_on_all_ranks(collector)  # doctest: +SKIP
    """
    batch, failure = None, ("", "")
    try:
        batch = collector.collect()
    except tuple(_REASONS) as error:
        failure = (_REASONS[type(error)], str(error))
    try:
        _raise_failures(failure)
    except CollectionFailed:
        if batch is not None:
            collector.put_back(batch)
        raise
    assert batch is not None  # no rank failed, this one included
    return batch


def _raise_failures(failure: tuple[str, str]) -> None:
    """Exchange this rank's (reason, text), empty if all is well, and raise on every rank if any has one."""
    failures = [(rank, reason, text) for rank, (reason, text) in enumerate(all_gather(failure)) if reason]
    if not failures:
        return
    reasons = [reason for _, reason, _ in failures]
    worst = _REASONS[GenerationFailed] if _REASONS[GenerationFailed] in reasons else reasons[0]
    raise CollectionFailed("; ".join(f"rank {rank}: {text}" for rank, _, text in failures), reason=worst)
