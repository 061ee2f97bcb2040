"""Evaluation: accuracy over several samples per problem, with standard errors."""

from dapo_components.evaluation.evaluator import accuracy_metrics, format_metrics

__all__ = ["accuracy_metrics", "format_metrics"]
