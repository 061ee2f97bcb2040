"""Slow float64 loops for losses, advantages and corrections, written from the equations of the papers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

GOLDEN_CASES = ("b4t7_f64", "b8t17_f32", "b8t17empty_f64")


def golden(case: str) -> dict[str, Any]:
    """Seeded inputs, and what other libraries and an independent derivation computed from them."""
    with np.load(Path(__file__).parent / "golden" / f"policy_{case}.npz") as arrays:
        loaded = {name: torch.as_tensor(np.asarray(arrays[name])) for name in arrays}
    loaded["mask"] = loaded["mask"].bool()
    return loaded


def tolerance(case: str, **double: float) -> dict[str, Any]:
    """How closely published numbers are met: to rounding, in the number format of the case."""
    if case.endswith("f32"):
        return {"rtol": 2e-5, "atol": 1e-6}
    return {"rtol": 1e-8, "atol": 1e-10, **double}


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient that a backward pass has left, which must exist."""
    assert tensor.grad is not None
    return tensor.grad


def pad_groups(values: torch.Tensor, group_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Lay ragged groups out as [num_groups, largest] with a mask of real members; also the rows of each group."""
    rows = [torch.nonzero(group_index == index).flatten().tolist() for index in group_index.unique().tolist()]
    width = max(len(members) for members in rows)
    padded = torch.full((len(rows), width), float("nan"), dtype=values.dtype)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for group, members in enumerate(rows):
        padded[group, : len(members)] = values[members]
        valid[group, : len(members)] = True
    return padded, valid, rows


def clipped_loss(log_ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    """PPO with separate bounds, and the dual clip."""
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * clipped)
    if dual is not None and advantage < 0:
        loss = min(loss, -advantage * dual)
    return loss


def clipped_gradient(log_ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    """Derivative of the above: -A r, or 0 where a bound is active."""
    ratio = math.exp(log_ratio)
    if advantage > 0 and ratio > 1 + high:
        return 0.0
    if advantage < 0 and (ratio < 1 - low or (dual is not None and ratio > dual)):
        return 0.0
    return -advantage * ratio


def kl_value(log_prob: float, ref_log_prob: float, estimator: str) -> float:
    difference = log_prob - ref_log_prob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    if estimator == "k3":
        return math.exp(-difference) - 1 + difference
    return abs(difference)


def group_advantage(rewards, *, scale="std", eps=1e-6, ddof=1, valid=None):
    """One group; equal rewards and lonely members get 0."""
    valid = [True] * len(rewards) if valid is None else valid
    members = [float(reward) for reward, usable in zip(rewards, valid, strict=True) if usable]
    if len(members) < 2 or max(members) == min(members):
        return [0.0] * len(rewards)
    mean = sum(members) / len(members)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in members) / (len(members) - ddof))
    divisor = std + eps if scale == "std" else 1.0
    return [(float(reward) - mean) / divisor if usable else 0.0 for reward, usable in zip(rewards, valid, strict=True)]


def leave_one_out(rewards, *, valid=None):
    """One group: reward minus the mean of the others."""
    valid = [True] * len(rewards) if valid is None else valid
    members = [index for index, usable in enumerate(valid) if usable]
    advantages = [0.0] * len(rewards)
    for index in members:
        others = [float(rewards[other]) for other in members if other != index]
        if others:
            advantages[index] = float(rewards[index]) - sum(others) / len(others)
    return advantages


def correction_weights(old, rollout, mask, *, level, mode, upper, lower=None):
    """Rows of importance weights between sampler and trainer."""
    weights = []
    for old_row, rollout_row, mask_row in zip(old, rollout, mask, strict=True):
        differences = [o - r for o, r, m in zip(old_row, rollout_row, mask_row, strict=True) if m]
        row = []
        for old_token, rollout_token, counted in zip(old_row, rollout_row, mask_row, strict=True):
            if not counted:
                row.append(0.0)
                continue
            if level == "token":
                log_weight = old_token - rollout_token
            elif level == "sequence":
                log_weight = sum(differences)
            else:
                log_weight = sum(differences) / len(differences)
            weight = math.exp(min(max(log_weight, -20.0), 20.0))
            if mode == "truncate":
                row.append(min(weight, upper))
            else:
                row.append(weight if (lower or 0.0) <= weight <= upper else 0.0)
        weights.append(row)
    return weights


def loss_weights(mask, mode: str, *, length_scale=None):
    """Weights of [B, G, T] tokens such that the loss is their sum with the per-token losses."""
    mask = np.asarray(mask, dtype=bool)
    num_tokens, num_sequences = 0, 0
    for group in mask:
        for row in group:
            num_tokens += int(row.sum())
            num_sequences += int(row.any())
    num_groups = sum(int(group.any()) for group in mask)
    weights = np.zeros(mask.shape)
    for b, g, t in np.argwhere(mask):
        row_tokens, group_tokens = int(mask[b, g].sum()), int(mask[b].sum())
        weights[b, g, t] = {
            "token_mean": 1 / num_tokens,
            "seq_mean_token_mean": 1 / (row_tokens * num_sequences),
            "seq_mean_token_sum": 1 / num_sequences,
            "seq_mean_token_sum_norm": 1 / (num_sequences * (length_scale or 1)),
            "group_token_mean": 1 / (group_tokens * num_groups),
        }[mode]
    return weights
