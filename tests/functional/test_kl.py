"""KL estimators: hand-computed values, and which gradient each one has in expectation."""

from __future__ import annotations

import math

import pytest
import torch

from dapo_components.functional.kl import KL_ESTIMATORS, kl_penalty
from tests.oracles_policy import GOLDEN_CASES, golden, grad_of, kl_value, tolerance

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    ("estimator", "likelier", "rarer"),
    [
        ("k1", 1.0, -1.0),
        ("k2", 0.5, 0.5),
        ("k3", math.exp(-1), math.e - 2),
        ("abs", 1.0, 1.0),
    ],
)
def test_values(estimator, likelier, rarer):
    log_prob, ref = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -1.0, -3.0])
    torch.testing.assert_close(
        kl_penalty(log_prob, ref, estimator=estimator), torch.tensor([likelier, rarer, 0.0], dtype=torch.float32)
    )


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_agrees_with_the_loop(estimator):
    generator = torch.Generator().manual_seed(1)
    log_prob, ref = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    value = kl_penalty(log_prob, ref, estimator=estimator)
    for i in range(3):
        for j in range(4):
            expected = kl_value(log_prob[i, j].item(), ref[i, j].item(), estimator)
            assert value[i, j].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_agrees_with_published_values(case, estimator):
    arrays = golden(case)
    mask = arrays["mask"]
    log_prob = arrays["logp"].requires_grad_()
    # The published k3 is bounded to 10; without the bound, the independent derivation is the reference.
    value = kl_penalty(log_prob, arrays["ref_logp"], estimator=estimator, clamp=10.0, mask=mask)
    expected = arrays[f"verl/kl/{estimator}/kl"].to(value.dtype)
    torch.testing.assert_close(value[mask], expected[mask], **tolerance(case))
    (value.sum() / mask.sum()).backward()
    torch.testing.assert_close(
        grad_of(log_prob), arrays[f"verl/kl/{estimator}/grad_logp"].to(value.dtype), **tolerance(case)
    )


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_unbounded_k3_agrees_with_an_independent_derivation(case):
    arrays = golden(case)
    mask = arrays["mask"]
    value = kl_penalty(arrays["logp"].double(), arrays["ref_logp"].double(), estimator="k3")
    torch.testing.assert_close(value[mask], arrays["reference/kl/k3/kl"].double()[mask], rtol=1e-6, atol=1e-9)


def policy_gradients(estimator: str) -> tuple[torch.Tensor, ...]:
    """Expected gradient of the estimator as a loss, and the gradients of both KL divergences, by enumeration."""
    logits = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.5, 0.2, 0.4, 0.9], dtype=torch.float64).log_softmax(-1)
    log_prob = logits.log_softmax(-1)
    # Samples come from the policy, so each token's gradient is weighted by its probability, itself not differentiated.
    expected_loss = (log_prob.exp().detach() * kl_penalty(log_prob, ref, estimator=estimator)).sum()
    reverse = (log_prob.exp() * (log_prob - ref)).sum()
    forward = (ref.exp() * (ref - log_prob)).sum()
    return tuple(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (expected_loss, reverse, forward))


def test_k1_as_a_loss_has_no_expected_gradient():
    gradient, reverse, _ = policy_gradients("k1")
    torch.testing.assert_close(gradient, torch.zeros(4, dtype=torch.float64), atol=1e-15, rtol=0.0)
    assert reverse.abs().max() > 0.1


def test_k2_as_a_loss_has_the_reverse_kl_gradient():
    gradient, reverse, forward = policy_gradients("k2")
    torch.testing.assert_close(gradient, reverse)
    assert (gradient - forward).abs().max() > 0.01


def test_k3_as_a_loss_has_the_forward_kl_gradient():
    gradient, reverse, forward = policy_gradients("k3")
    torch.testing.assert_close(gradient, forward)
    assert (gradient - reverse).abs().max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_value_of_the_kl_on_average(estimator):
    log_prob = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64).log_softmax(-1)
    ref = torch.tensor([-0.5, 0.2, 0.4], dtype=torch.float64).log_softmax(-1)
    expected = (log_prob.exp() * (log_prob - ref)).sum()
    torch.testing.assert_close((log_prob.exp() * kl_penalty(log_prob, ref, estimator=estimator)).sum(), expected)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_gradcheck(estimator):
    log_prob = torch.tensor([-1.0, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -0.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, estimator=estimator), (log_prob,))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_masked_positions_may_hold_anything(estimator, bad):
    log_prob = torch.tensor([-1.0, bad, 0.0], requires_grad=True)
    ref = torch.tensor([-2.0, bad, bad])
    value = kl_penalty(log_prob, ref, estimator=estimator, mask=torch.tensor([True, False, False]))
    value.sum().backward()
    torch.testing.assert_close(value, torch.tensor([kl_value(-1.0, -2.0, estimator), 0.0, 0.0]))
    slope = {"k1": 1.0, "k2": 1.0, "k3": 1 - math.exp(-1), "abs": 1.0}[estimator]
    torch.testing.assert_close(grad_of(log_prob), torch.tensor([slope, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("estimator", "difference", "expected"),
    [
        ("k1", 12.0, 10.0),
        ("k1", -12.0, -10.0),
        ("k2", 5.0, 10.0),
        ("k3", -3.0, 10.0),  # exp(3) - 4 = 16
        ("k3", -2.0, math.exp(2) - 3),  # 4.39, untouched
        ("k3", 12.0, 10.0),
        ("k3", -200.0, 10.0),  # exp(200) overflows float32
        ("abs", -12.0, 10.0),
    ],
)
def test_clamp_bounds_value_and_stops_the_gradient(estimator, difference, expected):
    log_prob = torch.tensor([difference], requires_grad=True)
    value = kl_penalty(log_prob, torch.zeros(1), estimator=estimator, clamp=10.0)
    value.sum().backward()
    torch.testing.assert_close(value, torch.tensor([expected]))
    slope = 1 - math.exp(2) if difference == -2.0 else 0.0
    torch.testing.assert_close(grad_of(log_prob), torch.tensor([slope]))


@pytest.mark.parametrize("clamp", [1e-4, 0.1, 2.0, 50.0])
def test_clamp_changes_k3_only_above_it(clamp):
    difference = torch.linspace(-9.0, 9.0, 1001, dtype=torch.float64)
    zero = torch.zeros_like(difference)
    unbounded = kl_penalty(difference, zero, estimator="k3")
    torch.testing.assert_close(kl_penalty(difference, zero, estimator="k3", clamp=clamp), unbounded.clamp(max=clamp))


def test_small_differences_keep_their_precision():
    # The textbook form exp(-x) - 1 + x is 0 or 6e-8 here in float32.
    value = kl_penalty(torch.tensor([1e-3]), torch.zeros(1), estimator="k3")
    torch.testing.assert_close(value, torch.tensor([4.9983e-7]), rtol=1e-3, atol=0.0)


def test_no_gradient_into_the_reference_and_half_precision():
    log_prob = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    ref = torch.tensor([-2.0], dtype=torch.bfloat16, requires_grad=True)
    value = kl_penalty(log_prob, ref)
    value.sum().backward()
    assert ref.grad is None
    torch.testing.assert_close(value, torch.tensor([math.exp(-1)]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"estimator": "k4"}, "KL estimator must be one of k1, k2, k3, abs, got 'k4'"),
        ({"clamp": 0.0}, "KL clamp must be above 0, got 0.0"),
        ({"clamp": NAN}, "KL clamp"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kl_penalty(torch.zeros(1), torch.zeros(1), **arguments)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"one shape, got \(2, 3\) and \(3,\)"):
        kl_penalty(torch.zeros(2, 3), torch.zeros(3))
