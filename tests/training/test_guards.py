"""Real signals, gradients that are not finite, and a sampler that disagrees."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
from torch import nn

from dapo_components.training import guards
from dapo_components.training.guards import FiniteGradientGuard, InterruptGuard, RunStopped, check_sampler_agreement


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class TestInterruptGuard:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_the_first_signal_is_a_request(self, capsys, number):
        with InterruptGuard() as guard:
            assert guard.requested() is False
            send(number)
            assert guard.requested() is True
        assert capsys.readouterr().out == (
            "\nstopping after this step, with a checkpoint; press Ctrl-C again to stop at once without one\n"
        )

    def test_the_second_signal_interrupts_at_once(self, monkeypatch):
        monkeypatch.setattr(guards, "_SAME_SIGNAL_SECONDS", 0.0)
        with InterruptGuard():
            send(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)

    def test_a_launcher_that_passes_the_ctrl_c_on_is_not_a_second_one(self):
        with InterruptGuard() as guard:
            send(signal.SIGINT)
            send(signal.SIGINT)
            send(signal.SIGTERM)
            assert guard.requested() is True

    def test_former_handlers_come_back(self):
        received = []
        former = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
        try:
            with InterruptGuard():
                pass
            send(signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, former)
        assert received == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)

    def test_handlers_come_back_after_an_error_too(self):
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(RuntimeError, match="inside"), InterruptGuard():
            raise RuntimeError("inside")
        assert signal.getsignal(signal.SIGINT) is before


def with_gradient(*values: float) -> list[nn.Parameter]:
    """One parameter per value, its gradient."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor([value])
    return parameters


class TestFiniteGradientGuard:
    @pytest.mark.parametrize(("max_norm", "expected"), [(2.5, [1.5, 2.0]), (5.0, [3.0, 4.0]), (50.0, [3.0, 4.0])])
    def test_the_norm_over_all_parameters_is_clipped_in_place(self, max_norm, expected):
        parameters = with_gradient(3.0, 4.0)
        assert FiniteGradientGuard().clip(parameters, max_norm) == (5.0, True)
        assert [float(parameter.grad) for parameter in parameters if parameter.grad is not None] == pytest.approx(
            expected, abs=1e-5
        )

    def test_no_gradient_at_all_has_norm_zero(self):
        assert FiniteGradientGuard().clip([nn.Parameter(torch.zeros(1))], 1.0) == (0.0, True)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_an_update_that_is_not_finite_is_skipped_and_a_row_of_them_stops(self, value):
        guard = FiniteGradientGuard(max_in_a_row=3)
        allowed = [guard.clip(with_gradient(v, 1.0), 1.0)[1] for v in (1.0, value, value)]
        assert allowed == [True, False, False]
        with pytest.raises(RunStopped, match=rf"the gradient norm was {value} in 3 updates in a row"):
            guard.clip(with_gradient(value), 1.0)

    def test_a_good_update_starts_the_count_again(self):
        guard = FiniteGradientGuard(max_in_a_row=2)
        values = [math.nan, 1.0, math.nan, 0.0, math.nan]
        assert [guard.clip(with_gradient(value), 1.0)[1] for value in values] == [False, True, False, True, False]

    def test_one_in_a_row_stops_at_once(self):
        with pytest.raises(RunStopped):
            FiniteGradientGuard(max_in_a_row=1).clip(with_gradient(math.nan), 1.0)
        with pytest.raises(ValueError, match="max_in_a_row must be >= 1, got 0"):
            FiniteGradientGuard(max_in_a_row=0)


@pytest.mark.parametrize("difference", [0.0, 9e-5, 1e-4])
def test_agreement_up_to_the_limit_passes(difference):
    check_sampler_agreement(difference, limit=1e-4)


@pytest.mark.parametrize(("difference", "shown"), [(1.1e-4, "0.00011"), (math.inf, "inf"), (math.nan, "nan")])
def test_disagreement_stops_the_run_with_numbers(difference, shown):
    with pytest.raises(RunStopped, match=rf"differs by {shown}, more than max_log_prob_difference=0.0001\."):
        check_sampler_agreement(difference, limit=1e-4)
