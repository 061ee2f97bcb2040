"""Pieces of a training loop: model access, distribution, checkpoints, configuration.

:mod:`dapo_components.training.torchtune_state` is not exported here, since it needs torchtune.
"""

from dapo_components.training.batch_arithmetic import BatchArithmetic
from dapo_components.training.checkpoint import CheckpointError, CheckpointStore
from dapo_components.training.config import ConfigError, build, parse_config
from dapo_components.training.distributed import all_gather, all_reduce_counts, full_parameters
from dapo_components.training.entry import run_recipe, user_errors
from dapo_components.training.guards import FiniteGradientGuard, InterruptGuard, RunStopped, check_sampler_agreement
from dapo_components.training.memory import estimate_memory
from dapo_components.training.metrics import MetricSums, Stopwatch, add_rollout_metrics, add_sampler_agreement
from dapo_components.training.policy import (
    ForwardSettings,
    batch_log_probs,
    idle_packed,
    micro_batches,
    packed_log_probs,
)
from dapo_components.training.run_folder import open_run_folder
from dapo_components.training.schedule import is_due, learning_rate_factor

__all__ = [
    "BatchArithmetic",
    "CheckpointError",
    "CheckpointStore",
    "ConfigError",
    "FiniteGradientGuard",
    "ForwardSettings",
    "InterruptGuard",
    "MetricSums",
    "RunStopped",
    "Stopwatch",
    "add_rollout_metrics",
    "add_sampler_agreement",
    "all_gather",
    "all_reduce_counts",
    "batch_log_probs",
    "build",
    "check_sampler_agreement",
    "estimate_memory",
    "full_parameters",
    "idle_packed",
    "is_due",
    "learning_rate_factor",
    "micro_batches",
    "open_run_folder",
    "packed_log_probs",
    "parse_config",
    "run_recipe",
    "user_errors",
]
