import pytest
import torch
from torch import nn

from dapo_components.training.causal_lm import (
    attention_window,
    backbone_hidden,
    forward_with_head,
    head_parameters,
    huggingface_mask,
    max_model_length,
    model_kind,
)
from tests.helpers import TINY_MODELS, tiny_huggingface, tiny_torchtune

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])

each_model = pytest.mark.parametrize("build", TINY_MODELS.values(), ids=TINY_MODELS)


def logits_of(model, tokens):
    output = model(tokens)
    return output if isinstance(output, torch.Tensor) else output.logits


def packed(lengths):
    """Mask and positions of sequences of these lengths in one row."""
    mask = torch.block_diag(*[torch.ones(length, length).tril() for length in lengths]).bool()[None]
    return torch.cat([torch.arange(length) for length in lengths])[None], mask


@pytest.mark.parametrize("tied", [True, False])
@each_model
def test_hidden_times_head_is_the_models_logits(build, tied):
    model = build(tied=tied)
    weight, bias = head_parameters(model)
    assert weight.shape == (13, 16)
    assert bias is None
    hidden = backbone_hidden(model, TOKENS)
    assert torch.equal(hidden @ weight.T, logits_of(model, TOKENS))


@pytest.mark.parametrize("tied", [True, False])
@each_model
def test_gradients_reach_backbone_and_head(build, tied):
    model, reference = build(tied=tied), build(tied=tied)
    logits_of(reference, TOKENS).square().sum().backward()
    weight, _ = head_parameters(model)
    (backbone_hidden(model, TOKENS) @ weight.T).square().sum().backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


@each_model
def test_packed_sequences_equal_separate_ones(build):
    model = build()
    positions, mask = packed([5, 5])
    hidden = backbone_hidden(model, TOKENS.reshape(1, 10), positions, mask)
    torch.testing.assert_close(hidden.view(2, 5, 16), backbone_hidden(model, TOKENS), rtol=1e-5, atol=2e-6)


def test_eager_attention_takes_the_mask_too():
    model = tiny_huggingface()
    expected = backbone_hidden(model, TOKENS)
    model.set_attn_implementation("eager")
    positions, mask = packed([5, 5])
    hidden = backbone_hidden(model, TOKENS.reshape(1, 10), positions, mask)
    torch.testing.assert_close(hidden.view(2, 5, 16), expected, rtol=1e-5, atol=2e-6)


@each_model
def test_a_packed_row_may_be_longer_than_the_model_but_positions_may_not(build):
    model = build(max_seq_len=6)
    positions, mask = packed([5, 5])
    hidden = backbone_hidden(model, TOKENS.reshape(1, 10), positions, mask)
    torch.testing.assert_close(hidden.view(2, 5, 16), backbone_hidden(model, TOKENS), rtol=1e-5, atol=2e-6)
    assert max_model_length(model) == 6


def test_positions_beyond_a_torchtune_model_are_refused():
    model = tiny_torchtune(max_seq_len=6)
    with pytest.raises(ValueError, match="positions must be < max_seq_len=6 of the model, got 9"):
        backbone_hidden(model, TOKENS.reshape(1, 10))
    positions, mask = packed([7, 3])
    with pytest.raises(ValueError, match="positions must be < max_seq_len=6 of the model, got 6"):
        backbone_hidden(model, TOKENS.reshape(1, 10), positions, mask)
    assert model.max_seq_len == 6


@each_model
def test_head_sees_hidden_weight_and_bias_and_may_return_anything(build):
    model = build(tied=False)
    hidden, weight, bias = forward_with_head(model, TOKENS, head=lambda *arguments: arguments)
    assert torch.equal(hidden, backbone_hidden(model, TOKENS))
    assert weight is head_parameters(model)[0]
    assert bias is None


@each_model
def test_model_is_as_before_after_a_pass_and_after_an_error(build):
    model = build(tied=False)
    names, before = list(model.state_dict()), logits_of(model, TOKENS)

    def fail(*_):
        raise KeyError

    with pytest.raises(KeyError):
        forward_with_head(model, TOKENS, head=fail)
    backbone_hidden(model, TOKENS)
    assert list(model.state_dict()) == names
    assert torch.equal(logits_of(model, TOKENS), before)


def test_bias_of_the_head_is_returned():
    model = tiny_torchtune(tied=False)
    model.output = nn.Linear(16, 13)
    weight, bias = head_parameters(model)
    assert bias is model.output.bias
    hidden = backbone_hidden(model, TOKENS)
    torch.testing.assert_close(nn.functional.linear(hidden, weight, bias), logits_of(model, TOKENS))


def test_tied_head_is_the_embedding_itself():
    model = tiny_torchtune()
    assert head_parameters(model)[0] is model.tok_embeddings.weight
    model = tiny_huggingface()
    assert head_parameters(model)[0] is model.model.embed_tokens.weight


def test_heads_that_weight_and_bias_do_not_describe_are_refused():
    model = tiny_torchtune(tied=False)
    model.output = nn.Sequential(nn.Linear(16, 13), nn.Tanh())
    with pytest.raises(ValueError, match=r"vocabulary head must be a linear layer or tied .* got Sequential"):
        head_parameters(model)
    model = tiny_huggingface()
    model.config.logits_scaling = 1.0
    head_parameters(model)
    model.config.logits_scaling = 8.0
    with pytest.raises(ValueError, match=r"changes its logits after the head \(logits_scaling=8.0\)"):
        head_parameters(model)
    with pytest.raises(ValueError, match="logits_scaling"):
        backbone_hidden(model, TOKENS)


def test_masks_that_a_model_would_ignore_are_refused():
    model = tiny_huggingface()
    mask = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    model.config.sliding_window = 8
    with pytest.raises(ValueError, match=r"attends to the last 8 positions only.* got 9 positions, use at most 8"):
        huggingface_mask(model, mask)
    assert huggingface_mask(model, mask[:, :8, :8]).shape == (1, 1, 8, 8)
    model.config.sliding_window = None
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="must be sdpa or eager to take a mask, got 'flash_attention_2'"):
        huggingface_mask(model, mask)


def test_attention_window():
    model = tiny_huggingface()
    assert attention_window(model) is None
    assert attention_window(tiny_torchtune()) is None
    model.config.sliding_window = 8
    assert attention_window(model) == 8
    model.config.use_sliding_window = False
    assert attention_window(model) is None


def test_model_kinds():
    assert model_kind(tiny_torchtune()) == "torchtune"
    assert model_kind(tiny_huggingface()) == "huggingface"
    with pytest.raises(ValueError, match="got Linear; pass the model itself, not a wrapper"):
        model_kind(nn.Linear(1, 1))
