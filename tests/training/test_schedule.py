"""Warm-up, constant and cosine factors, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dapo_components.training.schedule import is_due, learning_rate_factor


def test_warm_up_then_constant():
    factors = [learning_rate_factor(step, warmup_steps=4, num_steps=6) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_no_warm_up_starts_at_the_full_rate():
    assert learning_rate_factor(0, warmup_steps=0, num_steps=5) == 1.0


def test_cosine_falls_from_one_to_zero_after_the_warm_up():
    factors = [learning_rate_factor(step, warmup_steps=2, num_steps=6, decay="cosine") for step in range(8)]
    # Quarter, half and three quarters of half a cosine: (1 + cos(pi / 4)) / 2, 1 / 2, (1 - cos(pi / 4)) / 2.
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466, 0.0, 0.0])


def test_a_run_shorter_than_its_warm_up_never_divides_by_zero():
    assert [learning_rate_factor(step, warmup_steps=3, num_steps=2, decay="cosine") for step in (0, 1, 3)] == (
        pytest.approx([1 / 3, 2 / 3, 1.0])
    )


def test_the_optimizer_gets_the_factor_of_the_update_it_is_about_to_do():
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, warmup_steps=2, num_steps=4)
    )
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        parameter.grad = torch.zeros(())
        optimizer.step()
        schedule.step()
    assert rates == [1.0, 2.0, 2.0]


def test_unknown_decay_is_refused():
    bad: Any = "linear"
    with pytest.raises(ValueError, match="decay must be 'constant' or 'cosine', got 'linear'"):
        learning_rate_factor(0, warmup_steps=0, num_steps=1, decay=bad)


def test_is_due():
    assert [step for step in range(1, 10) if is_due(step, 3)] == [3, 6, 9]
    assert not any(is_due(step, 0) for step in range(10))
