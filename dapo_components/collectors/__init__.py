"""Collectors turn prompts into batches."""

from dapo_components.collectors.distributed import CollectionFailed, collect_on_all_ranks, evaluate_on_all_ranks
from dapo_components.collectors.dynamic_sampling import DynamicSamplingCollector, DynamicSamplingExhausted
from dapo_components.collectors.rollout import GenerationFailed, RewardFailed, RolloutCollector, Rollouts, request_seed

__all__ = [
    "CollectionFailed",
    "DynamicSamplingCollector",
    "DynamicSamplingExhausted",
    "GenerationFailed",
    "RewardFailed",
    "RolloutCollector",
    "Rollouts",
    "collect_on_all_ranks",
    "evaluate_on_all_ranks",
    "request_seed",
]
