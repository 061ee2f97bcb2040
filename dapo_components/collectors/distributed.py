"""Collecting on several ranks that go on together or stop together."""

from __future__ import annotations

from tensordict import TensorDict

from dapo_components.collectors.dynamic_sampling import DynamicSamplingCollector, DynamicSamplingExhausted
from dapo_components.collectors.rollout import GenerationFailed, RewardFailed
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
    failures = [(rank, reason, text) for rank, (reason, text) in enumerate(all_gather(failure)) if reason]
    if batch is not None and not failures:
        return batch
    if batch is not None:
        collector.put_back(batch)
    reasons = [reason for _, reason, _ in failures]
    worst = _REASONS[GenerationFailed] if _REASONS[GenerationFailed] in reasons else reasons[0]
    raise CollectionFailed("; ".join(f"rank {rank}: {text}" for rank, _, text in failures), reason=worst)
