"""What a run leaves behind to read: metrics per optimizer step and a log of rollouts, both JSON Lines."""

from dapo_components.reporting.metrics_log import MetricsLog, read_metrics
from dapo_components.reporting.rollout_log import ROLLOUT_FIELDS, RolloutLog, read_rollouts
from dapo_components.reporting.run_report import RunReport

__all__ = ["ROLLOUT_FIELDS", "MetricsLog", "RolloutLog", "RunReport", "read_metrics", "read_rollouts"]
