"""Importance ratios: masked and bounded before any exponential."""

from __future__ import annotations

import pytest
import torch

from dapo_components.functional import sequence_log_ratio, token_log_ratio
from tests import oracles
from tests.oracles_policy import grad_of

NAN, INF = float("nan"), float("inf")
KEEP = torch.tensor([[True, True, False], [False, False, False]])


def test_token_log_ratio_by_hand():
    log_prob = torch.tensor([[-1.0, -3.0, NAN], [INF, NAN, -INF]], requires_grad=True)
    old = torch.tensor([[-1.5, -2.0, 0.0], [INF, 0.0, NAN]], requires_grad=True)
    ratio = token_log_ratio(log_prob, old, KEEP)
    assert ratio.tolist() == [[0.5, -1.0, 0.0], [0.0, 0.0, 0.0]]
    ratio.exp().sum().backward()
    expected = torch.tensor([[0.5, -1.0, 0.0], [0.0, 0.0, 0.0]]).exp() * KEEP
    torch.testing.assert_close(grad_of(log_prob), expected)
    assert old.grad is None


@pytest.mark.parametrize(
    ("difference", "clamp", "value", "slope"),
    [
        (19.0, 20.0, 19.0, 1.0),
        (21.0, 20.0, 20.0, 0.0),
        (-19.0, 20.0, -19.0, 1.0),
        (-21.0, 20.0, -20.0, 0.0),
        (-21.0, None, -21.0, 1.0),
        (3.0, 2.0, 2.0, 0.0),
    ],
)
@pytest.mark.parametrize("function", [token_log_ratio, sequence_log_ratio])
def test_the_bound_cuts_value_and_gradient(function, difference, clamp, value, slope):
    log_prob = torch.tensor([[difference]], requires_grad=True)
    ratio = function(log_prob, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), clamp=clamp)
    ratio.sum().backward()
    assert ratio.item() == value
    assert grad_of(log_prob).item() == slope


def test_sequence_log_ratio_by_hand():
    log_prob = torch.tensor([[-1.0, -3.0, NAN], [INF, NAN, -INF]], requires_grad=True)
    old = torch.tensor([[-1.5, -5.0, 0.0], [INF, 0.0, NAN]])
    assert sequence_log_ratio(log_prob, old, KEEP).tolist() == [1.25, 0.0]
    ratio = sequence_log_ratio(log_prob, old, KEEP, length_normalized=False)
    assert ratio.tolist() == [2.5, 0.0]
    sequence_log_ratio(log_prob, old, KEEP).sum().backward()
    assert grad_of(log_prob).tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_the_bound_of_a_sequence_is_not_applied_to_its_tokens():
    log_prob, old = torch.tensor([[30.0, -26.0]]), torch.zeros(1, 2)
    keep = torch.ones(1, 2, dtype=torch.bool)
    assert sequence_log_ratio(log_prob, old, keep).tolist() == [2.0]
    assert sequence_log_ratio(log_prob, old, keep, length_normalized=False).tolist() == [4.0]


@pytest.mark.parametrize("mean", [True, False])
def test_sequence_log_ratio_agrees_with_the_loop(mean, generator):
    log_prob, old = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator).unbind(0)
    keep = torch.rand(5, 7, generator=generator) < 0.5
    keep[3] = False
    expected = oracles.sequence_log_ratio(log_prob.numpy(), old.numpy(), keep.numpy(), mean=mean)
    found = sequence_log_ratio(log_prob, old, keep, length_normalized=mean)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    stacked = sequence_log_ratio(*(x.unsqueeze(0) for x in (log_prob, old, keep)), length_normalized=mean)
    assert torch.equal(stacked[0], found)


@pytest.mark.parametrize("function", [token_log_ratio, sequence_log_ratio])
def test_gradients_match_finite_differences(function, generator):
    old, keep = torch.randn(3, 4, dtype=torch.float64, generator=generator), torch.ones(3, 4, dtype=torch.bool)
    keep[1, 2:] = False
    log_prob = torch.randn(3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: function(x, old, keep), log_prob)


@pytest.mark.parametrize("function", [token_log_ratio, sequence_log_ratio])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(function, dtype):
    assert function(torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype), KEEP).dtype == dtype


@pytest.mark.parametrize("function", [token_log_ratio, sequence_log_ratio])
def test_bad_input_is_refused(function):
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=r"mask must be a tensor of dtype torch\.bool"):
        function(x, x, KEEP.float())
    with pytest.raises(ValueError, match=r"one shape, got \(2, 3\), \(2, 2\) and \(2, 3\)"):
        function(x, x[:, :2], KEEP)
    with pytest.raises(ValueError, match="clamp must be > 0 or None, got 0"):
        function(x, x, KEEP, clamp=0)
