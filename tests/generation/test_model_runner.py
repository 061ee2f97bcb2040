import pytest
import torch
from torch import nn

from dapo_components.generation.kv_cache import SlotCache
from dapo_components.generation.model_runner import ModelRunner, _logits
from tests.helpers import TINY_MODELS, plain_logits, tiny_torchtune


@pytest.mark.parametrize("build", TINY_MODELS.values(), ids=TINY_MODELS)
def test_prompts_then_tokens_equal_full_forward_passes(build):
    model = build()
    runner = ModelRunner(model)
    prompts = [[3], [1, 4, 1, 5, 9], [2, 6]]
    attention, logits = runner.run_prompts(prompts)
    for prompt, row in zip(prompts, logits, strict=True):
        torch.testing.assert_close(row, plain_logits(model, prompt)[-1], rtol=1e-5, atol=1e-5)
    cache = SlotCache(2)
    cache.reserve(3, 16, attention.keys[0])
    cache.load(attention, [2, 0, 1], [0, 1, 2])
    rows = [[*prompts[2], 7], [*prompts[0], 8], [*prompts[1], 9]]
    logits = runner.run_tokens([7, 8, 9], [2, 1, 5], cache, 16)
    for tokens, row in zip(rows, logits, strict=True):
        torch.testing.assert_close(row, plain_logits(model, tokens)[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", TINY_MODELS.values(), ids=TINY_MODELS)
def test_model_is_left_as_found(build):
    model = build().train()
    model.layers[0].eval() if hasattr(model, "layers") else model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    names = list(model.state_dict())
    runner = ModelRunner(model)
    _, logits = runner.run_prompts([[1, 2, 3]])
    assert not logits.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert list(model.state_dict()) == names
    output = model(torch.tensor([[1, 2, 3]]))
    assert (output if isinstance(output, torch.Tensor) else output.logits).requires_grad
    with pytest.raises(IndexError):
        runner.run_prompts([[1, 99]])
    assert [module.training for module in model.modules()] == modes
    assert "unembed" not in vars(model)


def test_dropout_is_off_while_sampling_from_a_model_in_training():
    model = tiny_torchtune()
    expected = plain_logits(model, [1, 2, 3])[-1]
    model.layers[0].mlp = nn.Sequential(model.layers[0].mlp, nn.Dropout(0.9))
    _, logits = ModelRunner(model.train()).run_prompts([[1, 2, 3]])
    torch.testing.assert_close(logits[0], expected)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("vocab", [100, 9000])
def test_head_in_pieces_equals_head_in_one(generator, vocab, with_bias):
    hidden = torch.randn(3, 8, generator=generator)
    weight = torch.randn(vocab, 8, generator=generator)
    bias = torch.randn(vocab, generator=generator) if with_bias else None
    torch.testing.assert_close(_logits(hidden, weight, bias), nn.functional.linear(hidden, weight, bias))
