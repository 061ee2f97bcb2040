"""Accuracy estimates over a set of problems, each with its standard error.

Shapes: ``B`` problems, ``n`` samples of each. The standard error is over problems (sample standard deviation of the
per-problem values over the root of ``B``), because samples of one problem are not independent of each other. Everything
is computed in float64. Two models evaluated on the same problems are compared by the differences of ``per_problem``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """A mean over problems.

    Args:
        value: Mean of ``per_problem``, 0-dim float64.
        stderr: Its standard error, 0-dim float64; NaN for a single problem, where it cannot be estimated.
        per_problem: One value per problem, ``[B]`` float64.

    Example:
        >>> value, stderr, per_problem = mean_at_k(torch.tensor([[1, 1], [0, 1]]))
        >>> f"{value:.2f} +- {stderr:.2f}"
        '0.75 +- 0.25'
    """

    value: Tensor
    stderr: Tensor
    per_problem: Tensor


def mean_at_k(correct: Tensor) -> Estimate:
    """Average score over all samples, the unbiased estimate of pass@1 (``avg@32`` in DAPO's tables).

    Args:
        correct: Score of each sample, ``[B, k]``, 0/1 or graded.

    Returns:
        The estimate.

    Raises:
        ValueError: If ``correct`` is not a non-empty ``[B, k]``.

    Example:
        >>> estimate = mean_at_k(torch.tensor([[1, 1], [1, 0], [0, 0]]))
        >>> round(estimate.value.item(), 4), round(estimate.stderr.item(), 4)
        (0.5, 0.2887)
    """
    if correct.ndim != 2 or correct.numel() == 0:
        raise ValueError(f"correct must be [B, k] with B, k >= 1, got shape {tuple(correct.shape)}")
    return _estimate(correct.to(torch.float64).mean(dim=-1))


def pass_at_k(num_samples: int | Tensor, num_correct: Tensor, k: int) -> Estimate:
    r"""Probability that at least one of ``k`` samples is correct, without bias.

    :math:`1 - \binom{n-c}{k} / \binom{n}{k}` for each problem (arXiv:2107.03374), as the product
    :math:`1 - \prod_{j<k} (n-c-j)/(n-j)`, which neither overflows nor cancels.

    Args:
        num_samples: Samples drawn per problem, one number or ``[B]``.
        num_correct: How many of them were correct, ``[B]``.
        k: Samples allowed.

    Returns:
        The estimate.

    Raises:
        ValueError: If ``k`` is below 1 or above the number of samples, or a count is outside ``[0, num_samples]``.

    Example:
        >>> pass_at_k(4, torch.tensor([2, 0]), k=2).per_problem
        tensor([0.8333, 0.0000], dtype=torch.float64)
    """
    if num_correct.ndim != 1 or num_correct.numel() == 0:
        raise ValueError(f"num_correct must be [B] with B >= 1, got shape {tuple(num_correct.shape)}")
    drawn = torch.as_tensor(num_samples, device=num_correct.device).expand_as(num_correct).to(torch.float64)
    if k < 1 or bool((drawn < k).any()):
        raise ValueError(f"k must be in [1, num_samples={int(drawn.min())}], got {k}; draw more samples per problem")
    wrong = drawn - num_correct.to(torch.float64)
    if bool(((wrong < 0) | (wrong > drawn)).any()):
        raise ValueError(f"num_correct must be in [0, num_samples], got {num_correct.tolist()} of {num_samples}")
    j = torch.arange(k, dtype=torch.float64, device=num_correct.device)
    # With fewer than k wrong samples one factor is exactly 0.
    all_wrong = ((wrong.unsqueeze(-1) - j) / (drawn.unsqueeze(-1) - j)).prod(dim=-1)
    return _estimate(1.0 - all_wrong)


def majority_at_k(
    answers: Sequence[Sequence[Hashable | None]], correct: Tensor | Sequence[Sequence[float]]
) -> Estimate:
    """Accuracy of the most frequent answer (self-consistency).

    Equal answers form a class; the class with most votes answers the problem, and is as correct as its members on
    average (a grader gives them the same verdict). A tie gives the mean of the tied classes, which is the expected
    value of breaking it at random. None is no answer and does not vote; a problem without any vote is wrong.

    Args:
        answers: Extracted answers, ``B`` rows of ``k`` each, in a normal form that makes equal answers equal.
        correct: Correctness of each sample, ``[B, k]`` or rows of numbers.

    Returns:
        The estimate.

    Raises:
        ValueError: If there is no problem, or the rows of the arguments differ in number or length.

    Example:
        >>> answers = [["7", "7", "8"], ["1", "2", None]]
        >>> majority_at_k(answers, torch.tensor([[1, 1, 0], [1, 0, 0]])).per_problem
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    verdicts = correct.tolist() if isinstance(correct, Tensor) else correct
    if len(answers) == 0 or len(answers) != len(verdicts):
        raise ValueError(
            f"answers and correct must hold the same problems, at least one, got {len(answers)} and {len(verdicts)}"
        )
    for index, (row, verdict) in enumerate(zip(answers, verdicts, strict=True)):
        if len(row) != len(verdict):
            raise ValueError(f"problem {index} has {len(row)} answers and {len(verdict)} entries in correct")
    values = [_majority(row, verdict) for row, verdict in zip(answers, verdicts, strict=True)]
    return _estimate(torch.tensor(values, dtype=torch.float64))


def _majority(answers: Sequence[Hashable | None], correct: Sequence[float]) -> float:
    votes: dict[Hashable, list[float]] = {}
    for answer, verdict in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(float(verdict))
    most = max(map(len, votes.values()), default=0)
    tied = [sum(verdicts) / most for verdicts in votes.values() if len(verdicts) == most]
    return sum(tied) / len(tied) if tied else 0.0


def _estimate(per_problem: Tensor) -> Estimate:
    num_problems = per_problem.numel()
    if num_problems == 1:
        # torch.std warns about a single value; the answer is the same NaN.
        return Estimate(per_problem.mean(), per_problem.new_tensor(torch.nan), per_problem)
    return Estimate(per_problem.mean(), per_problem.std(correction=1) / num_problems**0.5, per_problem)
