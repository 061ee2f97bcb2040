"""Clipped surrogate: values and gradients worked out by hand, an oracle loop, and published numbers."""

from __future__ import annotations

import math

import pytest
import torch

from dapo_components.functional.surrogates import active_clip_masks, clipped_surrogate, expand_to_tokens
from tests.oracles_policy import GOLDEN_CASES, clipped_gradient, clipped_loss, golden, grad_of, tolerance

NAN = float("nan")
INF = float("inf")


def loss_and_gradient(ratio: float, advantage: float, **bounds):
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    loss = clipped_surrogate(log_ratio, torch.tensor([advantage]), **bounds)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    return loss.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),  # gain capped at 1 + clip_eps_high
        (1.5, -1.0, 1.5, 1.5),  # a bad action that became likelier is not capped
        (0.5, 1.0, -0.5, -0.5),  # a good action that became rarer is not capped
        (0.5, -1.0, 0.8, 0.0),  # capped at 1 - clip_eps_low
        (1.27, 2.0, -2.54, -2.54),  # just inside the upper bound
        (1.29, 2.0, -2.56, 0.0),  # just outside
        (0.81, -2.0, 1.62, 1.62),  # just inside the lower bound
        (0.79, -2.0, 1.6, 0.0),  # just outside
        (1.0, 3.0, -3.0, -3.0),  # first update: the REINFORCE gradient -A
        (1.0, -3.0, 3.0, 3.0),
        (9.0, 0.0, 0.0, 0.0),  # no advantage, no loss
    ],
)
def test_clip_is_one_sided(ratio, advantage, expected, gradient):
    assert loss_and_gradient(ratio, advantage) == pytest.approx((expected, gradient), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (5.0, -1.0, 3.0, 0.0),  # capped at c
        (2.9, -1.0, 2.9, 2.9),  # just below c
        (3.1, -1.0, 3.0, 0.0),  # just above
        (0.5, -1.0, 0.8, 0.0),  # the lower bound still holds
        (5.0, 1.0, -1.28, 0.0),  # positive advantages do not see c
        (0.1, 1.0, -0.1, -0.1),
    ],
)
def test_dual_clip_caps_negative_advantages_only(ratio, advantage, expected, gradient):
    assert loss_and_gradient(ratio, advantage, dual_clip=3.0) == pytest.approx((expected, gradient), abs=1e-12)


def test_ratio_exactly_on_a_bound_keeps_its_gradient():
    # 0.75 and 1.5 are exact in binary, so the ratio is the bound itself.
    ratio = torch.tensor([1.5, 0.75], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    assert torch.equal(log_ratio.exp(), ratio)
    loss = clipped_surrogate(log_ratio, torch.tensor([1.0, -1.0]), clip_eps_low=0.25, clip_eps_high=0.5)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    torch.testing.assert_close(loss, torch.tensor([-1.5, 0.75], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([-1.5, 0.75], dtype=torch.float64))
    low, high, _ = active_clip_masks(log_ratio, torch.tensor([1.0, -1.0]), clip_eps_low=0.25, clip_eps_high=0.5)
    assert not low.any()
    assert not high.any()


def test_a_token_without_advantage_has_nothing_to_clip():
    log_ratio = torch.tensor([0.1, 0.5, 2.0, 9.0]).log()
    for active in active_clip_masks(log_ratio, torch.zeros(4), dual_clip=3.0):
        assert not active.any()


@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_agrees_with_the_loop(dual_clip):
    generator = torch.Generator().manual_seed(0)
    log_ratio = (torch.randn(4, 5, 7, generator=generator, dtype=torch.float64) * 0.7).requires_grad_()
    advantage = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    loss = clipped_surrogate(log_ratio, advantage, clip_eps_low=0.3, clip_eps_high=0.4, dual_clip=dual_clip)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    low, high, dual = active_clip_masks(log_ratio, advantage, clip_eps_low=0.3, clip_eps_high=0.4, dual_clip=dual_clip)
    for index in torch.cartesian_prod(torch.arange(4), torch.arange(5), torch.arange(7)).tolist():
        d, a = log_ratio[*index].item(), advantage[*index[:2]].item()
        assert loss[*index].item() == pytest.approx(clipped_loss(d, a, 0.3, 0.4, dual_clip))
        expected = clipped_gradient(d, a, 0.3, 0.4, dual_clip)
        assert gradient[*index].item() == pytest.approx(expected)
        assert (low | high | dual)[*index].item() is (expected == 0.0)
    # Each mask names its own bound, and the seed reaches all of them.
    ratio = log_ratio.exp()
    assert torch.equal(low, (ratio < 0.7) & (advantage < 0).unsqueeze(-1))
    assert torch.equal(high, (ratio > 1.4) & (advantage > 0).unsqueeze(-1))
    assert low.any()
    assert high.any()
    assert dual.any().item() is (dual_clip is not None)


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, 3.0), (0.2, 0.28, 10.0), (0.2, 0.28, 1.2)])
def test_agrees_with_published_token_sums(case, low, high, dual):
    arrays = golden(case)
    name = f"verl/loss/vanilla_lo{low}_hi{high}_c{dual}_token-sum_seq"
    log_prob = arrays["logp"].requires_grad_()
    log_ratio = torch.where(arrays["mask"], log_prob - arrays["old_logp"], 0.0)
    per_token = clipped_surrogate(log_ratio, arrays["adv_seq"], clip_eps_low=low, clip_eps_high=high, dual_clip=dual)
    loss = (per_token * arrays["mask"]).sum()
    loss.backward()
    torch.testing.assert_close(loss, arrays[f"{name}/loss"].to(loss.dtype), **tolerance(case))
    torch.testing.assert_close(grad_of(log_prob), arrays[f"{name}/grad_logp"].to(loss.dtype), **tolerance(case))


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_gradcheck_away_from_the_kinks(dual_clip):
    ratio = torch.tensor([0.4, 0.7, 0.9, 1.0, 1.1, 1.6, 4.0], dtype=torch.float64)
    log_ratio = ratio.log().repeat(2, 1).requires_grad_()
    advantage = torch.tensor([1.3, -0.7], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(x, advantage, dual_clip=dual_clip), (log_ratio,))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_masked_positions_may_hold_anything(bad):
    log_ratio = torch.tensor([[0.1, bad], [bad, 0.1]], requires_grad=True)
    advantage = torch.tensor([[1.0, bad], [bad, -1.0]])
    mask = torch.eye(2, dtype=torch.bool)
    loss = clipped_surrogate(log_ratio, advantage, dual_clip=3.0, mask=mask)
    loss.sum().backward()
    expected = math.exp(0.1)
    torch.testing.assert_close(loss, torch.tensor([[-expected, 0.0], [0.0, expected]]))
    torch.testing.assert_close(grad_of(log_ratio), torch.tensor([[-expected, 0.0], [0.0, expected]]))
    for active in active_clip_masks(log_ratio, advantage, mask=mask, dual_clip=3.0):
        assert not active.any()


def test_no_gradient_into_the_advantage():
    log_ratio = torch.zeros(1, 2, requires_grad=True)
    advantage = torch.ones(1, requires_grad=True)
    clipped_surrogate(log_ratio, advantage).sum().backward()
    assert advantage.grad is None
    assert log_ratio.grad is not None


def test_half_precision_is_computed_in_float32():
    log_ratio = torch.tensor([0.0078125], dtype=torch.bfloat16)  # exact in bfloat16, its exponential is not
    loss = clipped_surrogate(log_ratio, torch.ones(1, dtype=torch.bfloat16))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor([-math.exp(0.0078125)]))
    assert clipped_surrogate(log_ratio.double(), torch.ones(1)).dtype == torch.float64


def test_token_advantages_differ_from_response_advantages():
    log_ratio = torch.zeros(1, 2)
    torch.testing.assert_close(clipped_surrogate(log_ratio, torch.tensor([[1.0, -2.0]])), torch.tensor([[-1.0, 2.0]]))
    torch.testing.assert_close(clipped_surrogate(log_ratio, torch.tensor([3.0])), torch.tensor([[-3.0, -3.0]]))


def test_square_input_takes_the_advantage_by_response():
    advantage = expand_to_tokens(torch.tensor([1.0, 2.0]), torch.zeros(2, 2))
    assert advantage.tolist() == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("shape", [(3,), (2, 1), (2, 4), (1, 2, 3)])
def test_other_advantage_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"advantage must have the shape \(2, 3\).*\(2,\)"):
        clipped_surrogate(torch.zeros(2, 3), torch.zeros(shape))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"clip_eps_low": -0.1}, r"clip_eps_low must be in \[0, 1\), got -0.1"),
        ({"clip_eps_low": 1.0}, r"clip_eps_low must be in \[0, 1\), got 1.0"),
        ({"clip_eps_low": NAN}, "clip_eps_low"),
        ({"clip_eps_high": -0.1}, "clip_eps_high must be at least 0"),
        ({"clip_eps_high": INF}, "clip_eps_high"),
        ({"dual_clip": 1.0}, "dual_clip must be finite and above 1, got 1.0"),
        ({"dual_clip": INF}, "dual_clip"),
    ],
)
@pytest.mark.parametrize("function", [clipped_surrogate, active_clip_masks])
def test_bounds_out_of_range_are_refused(function, bounds, message):
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(1), torch.zeros(1), **bounds)


def test_bounds_at_the_edge_of_their_range_work():
    assert loss_and_gradient(1.1, 1.0, clip_eps_high=0.0) == pytest.approx((-1.0, 0.0))
    assert loss_and_gradient(0.9, -1.0, clip_eps_low=0.0) == pytest.approx((1.0, 0.0))
