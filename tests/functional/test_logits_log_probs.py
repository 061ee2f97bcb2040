"""What the autograd function of given logits does besides being right, which test_log_probs checks."""

from __future__ import annotations

import pytest
import torch

from dapo_components.functional.logits_log_probs import LogitsLogProbs

ROWS, VOCABULARY = 12, 40


def inputs(generator):
    logits = torch.randn(ROWS, VOCABULARY, generator=generator)
    return logits, torch.randint(VOCABULARY, (ROWS,), generator=generator)


def plain_gradient(logits, tokens):
    logits = logits.detach().clone().requires_grad_()
    logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).sum().backward()
    return logits.grad


def test_log_probs_equal_log_softmax_to_the_bit(generator):
    logits, tokens = inputs(generator)
    found, _ = LogitsLogProbs.apply(logits, tokens, None, 1.0, 5, False)
    assert torch.equal(found, logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1))


def test_the_chunk_size_changes_nothing(generator):
    logits, tokens = inputs(generator)
    logits.requires_grad_()
    for with_entropy in (False, True):
        results = []
        for chunk_size in (1, 5, 12, 100, None):
            found = LogitsLogProbs.apply(logits, tokens, None, 0.7, chunk_size, with_entropy)[: 1 + with_entropy]
            (gradient,) = torch.autograd.grad(torch.stack(found).sum(), logits)
            results.append((*found, gradient))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-7)


def test_an_unused_entropy_costs_no_gradient(generator):
    logits, tokens = inputs(generator)
    logits.requires_grad_()
    found, _ = LogitsLogProbs.apply(logits, tokens, None, 1.0, 5, True)
    found.sum().backward()
    torch.testing.assert_close(logits.grad, plain_gradient(logits, tokens))


def test_a_transposed_view_works(generator):
    logits, tokens = inputs(generator)
    view = logits.T.contiguous().T.requires_grad_()
    found, _ = LogitsLogProbs.apply(view, tokens, None, 1.0, 5, False)
    found.sum().backward()
    torch.testing.assert_close(view.grad, plain_gradient(logits, tokens))


def test_a_second_derivative_is_refused(generator):
    logits, tokens = inputs(generator)
    found, _ = LogitsLogProbs.apply(logits.requires_grad_(), tokens, None, 1.0, None, False)
    (gradient,) = torch.autograd.grad(found.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
