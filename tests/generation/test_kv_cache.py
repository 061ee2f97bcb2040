import pytest
import torch

from dapo_components.generation.kv_cache import PromptAttention, SlotCache, TokenAttention, round_up


def naive(query, key, value, scale):
    """One query over all keys: float64, one head at a time; ``[H, C]``, ``[K, L, C]``."""
    query, key, value = query.double(), key.double(), value.double()
    repeats = query.shape[0] // key.shape[0]
    rows = []
    for head in range(query.shape[0]):
        weights = (key[head // repeats] @ query[head] * scale).softmax(-1)
        rows.append(weights @ value[head // repeats])
    return torch.stack(rows).float()


def prompts_of(keys, values):
    prompts = PromptAttention(len(keys))
    prompts.keys, prompts.values = list(keys), list(values)
    return prompts


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("heads", [2, 6])
def test_token_attention_looks_at_its_own_slot_up_to_its_position(generator, heads, scale):
    lengths = [1, 7, 4]
    key, value = (torch.randn(3, 2, 8, 5, generator=generator) for _ in range(2))
    cache = SlotCache(1)
    cache.reserve(3, 8, key)
    cache.load(prompts_of([key], [value]), [0, 1, 2], [0, 1, 2])
    query = torch.randn(3, heads, 1, 5, generator=generator)
    new_key, new_value = (torch.randn(3, 2, 1, 5, generator=generator) for _ in range(2))
    output = TokenAttention(cache, torch.tensor(lengths), 8).attend(0, query, new_key, new_value, scale)
    for row, length in enumerate(lengths):
        keys = torch.cat([key[row, :, :length], new_key[row]], dim=1)
        values = torch.cat([value[row, :, :length], new_value[row]], dim=1)
        expected = naive(query[row, :, 0], keys, values, scale or 5**-0.5)
        torch.testing.assert_close(output[row, :, 0], expected)
        assert torch.equal(cache.keys[0][row, :, length], new_key[row, :, 0])


def test_prompt_attention_is_causal_and_keeps_keys(generator):
    query = torch.randn(2, 6, 4, 5, generator=generator)
    key, value = (torch.randn(2, 3, 4, 5, generator=generator) for _ in range(2))
    attention = PromptAttention(2)
    output = attention.attend(1, query, key, value, None)
    for position in range(4):
        expected = naive(query[1, :, position], key[1, :, : position + 1], value[1, :, : position + 1], 5**-0.5)
        torch.testing.assert_close(output[1, :, position], expected)
    assert torch.equal(attention.keys[1], key)
    assert torch.equal(attention.values[1], value)


def test_growth_keeps_contents_and_new_places_are_zero(generator):
    key = torch.randn(2, 1, 16, 3, generator=generator)
    cache = SlotCache(2)
    cache.reserve(2, 16, key)
    cache.load(prompts_of([key, 2 * key], [3 * key, 4 * key]), [1, 0], [0, 1])
    cache.reserve(3, 17, key)
    # 16 * 3 / 2 = 24, rounded up to a multiple of 16.
    assert [tensor.shape for tensor in cache.keys] == [torch.Size([3, 1, 32, 3])] * 2
    assert torch.equal(cache.keys[1][:2, :, :16], 2 * key[[1, 0]])
    assert torch.equal(cache.values[1][:2, :, :16], 4 * key[[1, 0]])
    assert not cache.keys[0][:, :, 16:].any()
    assert cache.num_bytes == 4 * 3 * 32 * 3 * 4
    held = [tensor.data_ptr() for tensor in cache.keys]
    cache.reserve(1, 5, key)
    assert [tensor.data_ptr() for tensor in cache.keys] == held
    cache.release()
    assert cache.num_bytes == 0


def test_one_prompt_serves_several_slots_and_others_stay(generator):
    key = torch.randn(1, 1, 2, 3, generator=generator)
    cache = SlotCache(1)
    cache.reserve(4, 16, key)
    cache.keys[0].fill_(9.0)
    cache.load(prompts_of([key], [key]), [0, 0], [3, 1])
    assert torch.equal(cache.keys[0][3, :, :2], key[0])
    assert torch.equal(cache.keys[0][1, :, :2], key[0])
    assert (cache.keys[0][[0, 2]] == 9.0).all()
    assert (cache.keys[0][:, :, 2:] == 9.0).all()


def test_move_and_zero(generator):
    key = torch.randn(4, 1, 16, 3, generator=generator)
    cache = SlotCache(1)
    cache.reserve(4, 16, key)
    cache.load(prompts_of([key], [-key]), [0, 1, 2, 3], [0, 1, 2, 3])
    cache.move([3, 2], [0, 1], 5)
    assert torch.equal(cache.keys[0][:2, :, :5], key[[3, 2], :, :5])
    assert torch.equal(cache.values[0][:2, :, :5], -key[[3, 2], :, :5])
    assert torch.equal(cache.keys[0][:2, :, 5:], key[:2, :, 5:])
    cache.keys[0][1] = torch.nan
    cache.zero([1])
    assert not cache.keys[0][1].any()
    assert cache.keys[0][[0, 2, 3]].any()
    cache.zero([])
    assert cache.keys[0][0].any()


@pytest.mark.parametrize(("length", "expected"), [(1, 16), (16, 16), (17, 32)])
def test_round_up(length, expected):
    assert round_up(length) == expected
