"""From graded samples to the numbers of a table: ``mean@k``, ``pass@k``, ``maj@k``."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from dapo_components.functional.evaluation import Estimate, majority_at_k, mean_at_k, pass_at_k

_STDERR = "_stderr"


def accuracy_metrics(
    accuracy: Tensor,
    *,
    ks: Sequence[int] = (),
    answers: Sequence[Sequence[Hashable | None]] | None = None,
    threshold: float = 0.5,
) -> dict[str, float]:
    """Summarise ``n`` graded samples of each of ``B`` problems.

    ``mean@n`` is the average score (DAPO's ``avg@32`` for n = 32), ``pass@k`` the unbiased estimate of "one of k
    samples is right" (arXiv:2107.03374), ``maj@n`` the accuracy of the most frequent answer. Each has a standard error
    over problems under its name with ``_stderr``; with one problem there is none, and it is left out.

    Args:
        accuracy: [B, n] scores in [0, 1].
        ks: Values of k for ``pass@k``, each in ``[1, n]``.
        answers: B rows of n extracted answers, equal where they mean the same; asks for ``maj@n``.
        threshold: A sample counts as right for ``pass@k`` when its score is above this.

    Returns:
        Name -> value, in the order of the description.

    Raises:
        ValueError: If ``accuracy`` is not a non-empty [B, n] of finite numbers, or a k is out of range.

    Example:
        >>> import torch
        >>> accuracy_metrics(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), ks=[2])
        {'mean@2': 0.75, 'mean@2_stderr': 0.25, 'pass@2': 1.0, 'pass@2_stderr': 0.0}
    """
    if accuracy.ndim != 2 or accuracy.numel() == 0:
        raise ValueError(f"accuracy must be [B, n] with B, n >= 1, got shape {tuple(accuracy.shape)}")
    if not bool(accuracy.isfinite().all()):
        count = int((~accuracy.isfinite()).sum())
        raise ValueError(f"accuracy must be finite, got {count} values that are not; every sample must be graded")
    num_samples = accuracy.shape[1]
    invalid = [k for k in ks if not 1 <= k <= num_samples]
    if invalid:
        raise ValueError(f"ks must be in [1, n={num_samples}], got {invalid[0]}; draw more samples per problem")
    estimates = {f"mean@{num_samples}": mean_at_k(accuracy)}
    num_correct = (accuracy > threshold).sum(dim=1)
    for k in sorted(set(ks)):
        estimates[f"pass@{k}"] = pass_at_k(num_samples, num_correct, k)
    if answers is not None:
        estimates[f"maj@{num_samples}"] = majority_at_k(answers, accuracy)
    return {key: value for name, estimate in estimates.items() for key, value in _entries(name, estimate).items()}


def format_metrics(metrics: Mapping[str, float], *, digits: int = 4) -> str:
    """Return a table of metrics, one a line, the standard error beside its value.

    Args:
        metrics: What :func:`accuracy_metrics` returns.
        digits: Digits after the point.

    Example:
        >>> print(format_metrics({"mean@4": 0.5, "mean@4_stderr": 0.05, "pass@4": 0.75}, digits=2))
        metric    value   stderr
        mean@4     0.50     0.05
        pass@4     0.75        -
    """
    names = [name for name in metrics if not name.endswith(_STDERR)]
    width = max([len("metric"), *map(len, names)]) + 2
    lines = [f"{'metric':<{width}}{'value':>7}{'stderr':>9}"]
    for name in names:
        stderr = metrics.get(name + _STDERR, math.nan)
        shown = "-" if math.isnan(stderr) else f"{stderr:.{digits}f}"
        lines.append(f"{name:<{width}}{metrics[name]:>7.{digits}f}{shown:>9}")
    return "\n".join(lines)


def _entries(name: str, estimate: Estimate) -> dict[str, float]:
    entries = {name: float(estimate.value), name + _STDERR: float(estimate.stderr)}
    return {key: value for key, value in entries.items() if not math.isnan(value)}
