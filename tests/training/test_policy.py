"""Packing changes no number: log-probs and gradients equal those of one sequence at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from dapo_components.training.policy import (
    ForwardSettings,
    batch_log_probs,
    idle_packed,
    micro_batches,
    packed_log_probs,
)
from tests.helpers import TINY_MODELS, tiny_torchtune
from tests.helpers_training import RAGGED, gradients, ragged_batch, reference_log_probs, sequence_log_probs

CPU = torch.device("cpu")
# Budget and longest shared row: everything in one row, some sharing, none, one sequence per micro-batch.
SETTINGS = [(200, 200), (30, 12), (30, 1), (13, 13)]


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def model(request) -> nn.Module:
    return TINY_MODELS[request.param](seed=1)


@pytest.fixture(scope="module")
def batch() -> TensorDict:
    return ragged_batch()


def forward(max_tokens=200, max_shared_length=200, **other) -> ForwardSettings:
    return ForwardSettings(max_tokens=max_tokens, max_shared_length=max_shared_length, chunk_size=4, **other)


def packed_gradients(model, batch, settings, weights) -> dict[str, Tensor]:
    """Gradients of ``sum(weights * log_prob)``, accumulated over micro-batches."""
    model.zero_grad()
    flat = weights.flatten(0, 1)
    for packed in micro_batches(batch, settings, device=CPU):
        assert packed is not None
        log_prob, _ = packed_log_probs(model, packed, settings)
        (packed.scatter(log_prob, flat.shape[-1]) * flat[packed.responses]).sum().backward()
    return gradients(model)


@pytest.mark.parametrize(("max_tokens", "max_shared_length"), SETTINGS)
def test_log_probs_equal_one_sequence_at_a_time(model, batch, max_tokens, max_shared_length):
    settings = forward(max_tokens, max_shared_length, temperature=0.7)
    found = batch_log_probs(model, batch, settings)
    with torch.no_grad():
        expected = reference_log_probs(model, batch, temperature=0.7)
    assert expected[batch["response_mask"]].max() < -0.01  # the model is not indifferent, and not certain
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found[~batch["response_mask"]] == 0).all()


@pytest.mark.parametrize(("max_tokens", "max_shared_length"), SETTINGS)
def test_gradients_equal_one_sequence_at_a_time(model, batch, max_tokens, max_shared_length):
    weights = torch.randn(batch["response_tokens"].shape, generator=torch.Generator().manual_seed(2))
    found = packed_gradients(model, batch, forward(max_tokens, max_shared_length), weights)
    model.zero_grad()
    (reference_log_probs(model, batch) * weights).sum().backward()
    expected = gradients(model)
    assert found.keys() == expected.keys()
    assert len(found) >= 10
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: name + text)


def test_only_responses_with_a_wanted_token_are_fed(batch):
    masked = batch.clone()
    masked["loss_mask"][0] = False
    masked["loss_mask"][1, :2] = False
    packed = list(micro_batches(masked, forward(), device=CPU))
    assert [part.responses.tolist() for part in packed if part] == [[5, 6, 7, 8]]


def test_masked_tokens_have_no_gradient_and_change_nothing(model, batch):
    """A masked suffix is not read; a masked position inside a response is context, but not predicted."""
    masked = batch.clone()
    masked["loss_mask"][0, 0, 4:] = False
    masked["loss_mask"][1, 2, 3] = False
    ones = torch.ones(batch["response_tokens"].shape)
    expected = packed_gradients(model, batch, forward(), ones * masked["loss_mask"])
    found = packed_gradients(model, masked, forward(), ones)
    changed = masked.clone()
    changed["response_tokens"][0, 0, 4:] = 12
    again = packed_gradients(model, changed, forward(), ones)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(again[name], found[name], rtol=0, atol=0)


def test_extra_padding_changes_nothing(model, batch):
    wide = batch.clone()
    for key, fill in [("prompt_tokens", 7), ("prompt_mask", False)]:
        wide[key] = torch.cat([torch.full((3, 3, 4), fill), batch[key]], dim=-1)
    for key, fill in [("response_tokens", 7), ("response_mask", False), ("loss_mask", False)]:
        wide[key] = torch.cat([batch[key], torch.full((3, 3, 5), fill)], dim=-1)
    found = batch_log_probs(model, wide, forward())
    assert found.shape == (3, 3, 14)
    torch.testing.assert_close(found[..., :9], batch_log_probs(model, batch, forward()), rtol=0, atol=0)
    assert (found[..., 9:] == 0).all()


def test_changing_a_response_never_changes_its_neighbours(model, batch):
    """All three responses of group 1 share a row; each is changed in turn."""
    before = batch_log_probs(model, batch, forward())
    for changed in range(3):
        other = batch.clone()
        other["response_tokens"][1, changed] = (other["response_tokens"][1, changed] + 1) % 13
        after = batch_log_probs(model, other, forward())
        others = [sample for sample in range(3) if sample != changed]
        torch.testing.assert_close(after[1, others], before[1, others], rtol=0, atol=1e-6)
        assert (after[1, changed] - before[1, changed])[: int(batch["response_length"][1, changed])].abs().max() > 0.01


def test_a_response_of_one_token_is_predicted_by_the_prompt(model):
    batch = ragged_batch([([1, 1], 4)], seed=3)
    found = batch_log_probs(model, batch, forward())
    (packed,) = micro_batches(batch, forward(), device=CPU)
    assert packed is not None
    assert packed.tokens.shape == (1, 4)
    with torch.no_grad():
        expected = [float(sequence_log_probs(model, batch, (0, sample), 1.0)) for sample in range(2)]
    assert found.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_permuting_groups_and_samples_permutes_the_result(model, batch):
    groups, samples = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])
    shuffled = batch[groups][:, samples]
    found = batch_log_probs(model, shuffled, forward(30, 12))
    expected = batch_log_probs(model, batch, forward(30, 12))[groups][:, samples]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_uniform_model_has_closed_form_values():
    model = tiny_torchtune(std=0.0)
    batch = ragged_batch()
    found = batch_log_probs(model, batch, forward())
    assert found[batch["response_mask"]].tolist() == pytest.approx([-math.log(13)] * 27)
    packed = next(iter(micro_batches(batch, forward(), device=CPU)))
    assert packed is not None
    log_prob, entropy = packed_log_probs(model, packed, forward(), with_entropy=True)
    assert entropy is not None
    assert entropy.tolist() == pytest.approx([math.log(13)] * len(log_prob))
    assert packed_log_probs(model, packed, forward())[1] is None


def test_no_wanted_token_means_no_micro_batch(batch):
    empty = batch.clone()
    empty["loss_mask"][:] = False
    assert list(micro_batches(empty, forward(), device=CPU)) == []
    empty["response_mask"][:] = False
    assert (batch_log_probs(tiny_torchtune(), empty, forward()) == 0).all()


def test_responses_without_any_column_are_accepted():
    batch = ragged_batch([([0, 0], 2)])
    assert batch["response_tokens"].shape == (1, 2, 0)
    assert list(micro_batches(batch, forward(), device=CPU)) == []


def test_the_idle_input_runs_and_its_loss_has_zero_gradients(model):
    model.zero_grad()
    log_prob, _ = packed_log_probs(model, idle_packed(CPU), forward())
    assert log_prob.shape == (1,)
    (0.0 * log_prob.sum()).backward()
    assert all((gradient == 0).all() for gradient in gradients(model).values())


def test_bfloat16_autocast_is_near_but_not_equal(model, batch):
    exact = batch_log_probs(model, batch, forward())
    rounded = batch_log_probs(model, batch, forward(compute_dtype="bf16"))
    difference = (rounded - exact)[batch["response_mask"]].abs()
    assert rounded.dtype == torch.float32
    assert 1e-4 < difference.max() < 0.2


def test_the_budget_is_kept_by_every_micro_batch(batch):
    for packed in micro_batches(batch, forward(30, 12), device=CPU):
        assert packed is not None
        assert packed.tokens.numel() <= 30
    with pytest.raises(ValueError, match="feeds 13 tokens to the model, more than max_tokens=12"):
        list(micro_batches(batch, forward(12), device=CPU))


def test_a_missing_mask_is_named(batch):
    with pytest.raises(KeyError, match="micro_batches needs the key 'loss_mask'"):
        list(micro_batches(batch.exclude("loss_mask"), forward(), device=CPU))


def test_unknown_precision_is_refused():
    bad: Any = "fp16"
    with pytest.raises(ValueError, match="compute_dtype must be 'fp32' or 'bf16', got 'fp16'"):
        ForwardSettings(compute_dtype=bad)


def test_the_ragged_batch_holds_what_these_tests_rely_on(batch):
    assert [lengths for lengths, _ in RAGGED] == batch["response_length"].tolist()
    assert int(batch["response_mask"].sum()) == 27
