"""Collectors turn prompts into batches."""

from dapo_components.collectors.dynamic_sampling import DynamicSamplingCollector, DynamicSamplingExhausted
from dapo_components.collectors.rollout import GenerationFailed, RolloutCollector, Rollouts, request_seed

__all__ = [
    "DynamicSamplingCollector",
    "DynamicSamplingExhausted",
    "GenerationFailed",
    "RolloutCollector",
    "Rollouts",
    "request_seed",
]
