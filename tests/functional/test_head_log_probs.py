"""What the head's autograd function does besides being right, which test_log_probs checks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dapo_components.functional.head_log_probs import HeadLogProbs

ROWS, WIDTH, VOCABULARY = 12, 8, 40
PRODUCT = 2 * ROWS * WIDTH * VOCABULARY


def head_inputs(generator):
    hidden = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, requires_grad=True)
    return hidden, weight, None, torch.randint(VOCABULARY, (ROWS,), generator=generator), 1.0, 5


def in_place_product(_, left, right, **kwargs):
    return 2 * left[0] * left[1] * right[1]


def flops(run) -> int:
    # It knows the products that return a new tensor only.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place_product}) as counter:
        run()
    return counter.get_total_flops()


def test_four_products_of_the_heads_size(generator):
    inputs = head_inputs(generator)
    found = []
    assert flops(lambda: found.append(HeadLogProbs.apply(*inputs, False)[0])) == PRODUCT
    assert flops(lambda: found[0].sum().backward()) == 3 * PRODUCT


@pytest.mark.parametrize(("frozen", "products"), [(0, 2), (1, 2)])
def test_a_frozen_input_saves_its_product(frozen, products, generator):
    inputs = head_inputs(generator)
    inputs[frozen].requires_grad_(False)
    (found, _) = HeadLogProbs.apply(*inputs, False)
    assert flops(lambda: found.sum().backward()) == products * PRODUCT


def test_backward_works_on_rows_with_a_gradient_alone(generator):
    found, _ = HeadLogProbs.apply(*head_inputs(generator), False)
    assert flops(lambda: found[:3].sum().backward()) == 3 * PRODUCT * 3 // ROWS
    found, _ = HeadLogProbs.apply(*head_inputs(generator), False)
    assert flops(lambda: (found * 0).sum().backward()) == 0


def test_entropy_alone_can_carry_the_gradient(generator):
    inputs = head_inputs(generator)
    _, entropy = HeadLogProbs.apply(*inputs, True)
    entropy.sum().backward()
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    log_probs = (hidden @ weight.T).log_softmax(-1)
    expected = torch.autograd.grad(-(log_probs.exp() * log_probs).sum(), (hidden, weight))
    torch.testing.assert_close((inputs[0].grad, inputs[1].grad), expected, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_is_refused(generator):
    inputs = head_inputs(generator)
    found, _ = HeadLogProbs.apply(*inputs, False)
    (gradient,) = torch.autograd.grad(found.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
