"""Slow float64 loops for reductions, ratios, shaping, evaluation and log-probs, written from the equations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch


def golden() -> dict[str, torch.Tensor]:
    """Numbers that published code and an independent derivation gave; the folder's README says which."""
    with np.load(Path(__file__).parent / "golden" / "functional.npz") as arrays:
        return {name: torch.as_tensor(np.asarray(arrays[name])) for name in arrays}


def aggregate(
    per_token: np.ndarray,
    mask: np.ndarray,
    group: Sequence[int],
    mode: str,
    *,
    length_scale: float = 1.0,
    world_size: int = 1,
) -> float:
    """Loss of rows [N, T] that belong to numbered groups; rows and groups without a token do not count."""
    rows = [[float(x) for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(per_token, mask, strict=True)]
    full = [row for row in rows if row]
    if not full:
        return 0.0
    if mode == "token_mean":
        total = sum(map(sum, full)) / sum(map(len, full))
    elif mode == "seq_mean_token_mean":
        total = sum(sum(row) / len(row) for row in full) / len(full)
    elif mode == "seq_mean_token_sum":
        total = sum(map(sum, full)) / len(full)
    elif mode == "seq_mean_token_sum_norm":
        total = sum(sum(row) / length_scale for row in full) / len(full)
    elif mode == "group_token_mean":
        means = []
        for index in sorted(set(group)):
            tokens = [x for row, g in zip(rows, group, strict=True) if g == index for x in row]
            if tokens:
                means.append(sum(tokens) / len(tokens))
        total = sum(means) / len(means)
    else:
        raise AssertionError(mode)
    return total * world_size


def sequence_log_ratio(log_prob: np.ndarray, old: np.ndarray, mask: np.ndarray, *, mean: bool) -> list[float]:
    """Sum or mean over the valid tokens of each row."""
    ratios = []
    for new_row, old_row, keep in zip(log_prob, old, mask, strict=True):
        terms = [float(n) - float(o) for n, o, m in zip(new_row, old_row, keep, strict=True) if m]
        ratios.append(sum(terms) / (max(len(terms), 1) if mean else 1))
    return ratios


def soft_overlong_punishment(length: int, max_length: int, buffer_length: int, penalty: float) -> float:
    """Equation 13 of DAPO, case by case."""
    if length <= max_length - buffer_length:
        return 0.0
    if length <= max_length:
        return penalty * ((max_length - buffer_length) - length) / buffer_length
    return -penalty


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Share of all choices of k samples that hold a correct one."""
    samples = [index < num_correct for index in range(num_samples)]
    return float(np.mean([any(choice) for choice in itertools.combinations(samples, k)]))


def log_prob(logits: np.ndarray, token: int, temperature: float = 1.0) -> float:
    """Log-softmax of one row at one token."""
    scaled = [float(x) / temperature for x in logits]
    peak = max(scaled)
    return scaled[token] - peak - math.log(sum(math.exp(x - peak) for x in scaled))


def entropy(logits: np.ndarray, temperature: float = 1.0) -> float:
    """Entropy of one row's softmax; a logit of -inf adds nothing."""
    terms = [log_prob(logits, token, temperature) for token in range(len(logits))]
    return -sum(math.exp(term) * term for term in terms if term > -math.inf)
