import pytest
import torch
from torch import nn

from dapo_components.generation.attention import attention_replaced, check_attention, num_layers
from dapo_components.generation.kv_cache import PromptAttention
from tests.helpers import TINY_MODELS, plain_logits, tiny_huggingface, tiny_torchtune


@pytest.mark.parametrize("build", TINY_MODELS.values(), ids=TINY_MODELS)
def test_replaced_causal_attention_computes_the_same_and_goes_away(build):
    model = build()
    check_attention(model)
    tokens = [3, 1, 4, 1, 5]
    before = plain_logits(model, tokens)
    attention = PromptAttention(2)
    with attention_replaced(model, attention):
        torch.testing.assert_close(plain_logits(model, tokens), before)
    assert attention.keys[1].shape == (1, 2, 5, 4)
    attention.keys = []  # a further call would fail
    assert torch.equal(plain_logits(model, tokens), before)
    assert num_layers(model) == 2


def test_both_families_hand_over_the_same_keys_up_to_the_order_inside_a_head():
    kept = []
    for build in TINY_MODELS.values():
        attention = PromptAttention(2)
        model = build()
        check_attention(model)
        with attention_replaced(model, attention):
            plain_logits(model, [3, 1, 4])
        kept.append(attention)
    # torchtune rotates neighbouring pairs, Hugging Face halves.
    torch.testing.assert_close(kept[0].keys[1][..., [0, 2, 1, 3]], kept[1].keys[1])
    torch.testing.assert_close(kept[0].values[1], kept[1].values[1])


@pytest.mark.parametrize("build", TINY_MODELS.values(), ids=TINY_MODELS)
def test_attention_is_restored_after_an_error(build):
    model = build()
    check_attention(model)
    before = plain_logits(model, [1, 2])
    with pytest.raises(KeyError), attention_replaced(model, PromptAttention(2)):
        raise KeyError
    assert torch.equal(plain_logits(model, [1, 2]), before)


def test_a_layer_that_does_not_call_is_noticed():
    model = tiny_huggingface()
    check_attention(model)
    layers = model.model.layers
    with pytest.raises(RuntimeError, match="1 of 2 layers of LlamaForCausalLM did not use the replaced attention"):
        with attention_replaced(model, PromptAttention(2)):
            layers[0](torch.zeros(1, 1, 16), position_embeddings=(torch.ones(1, 1, 4), torch.zeros(1, 1, 4)))


def test_attention_with_further_terms_is_refused():
    model = tiny_huggingface()
    check_attention(model)
    from transformers import AttentionInterface

    function = AttentionInterface()["dapo_components"]
    query = torch.zeros(1, 4, 1, 4)
    for extra in ({"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"attention_mask": torch.ones(1, 1, 1, 1)}):
        arguments = {"attention_mask": None, **extra}
        with pytest.raises(ValueError, match=f"attention of LlamaAttention uses .*{next(iter(extra))}"):
            function(model.model.layers[0].self_attn, query, query, query, **arguments)


def test_torchtune_caches_and_other_attention_are_refused():
    model = tiny_torchtune()
    model.setup_caches(batch_size=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="has torchtune key/value caches set up"):
        check_attention(model)
    model = tiny_torchtune()
    model.layers[1].attn = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layer 1 of the model must be plain self-attention .* got Linear"):
        check_attention(model)
