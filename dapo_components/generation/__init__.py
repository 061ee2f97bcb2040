"""Engines that turn prompts into responses."""

from dapo_components.generation.base import Completion, FinishReason, GenerationRequest, Generator, SamplingParams
from dapo_components.generation.causal_lm import CausalLMGenerator
from dapo_components.generation.weights import WeightUpdateError

__all__ = [
    "CausalLMGenerator",
    "Completion",
    "FinishReason",
    "GenerationRequest",
    "Generator",
    "SamplingParams",
    "WeightUpdateError",
]
