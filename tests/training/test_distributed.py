"""In one process every collective is the identity; several processes are in tests/distributed/test_ranks.py."""

from __future__ import annotations

import torch
from torch import nn
from torchtune.training import set_activation_checkpointing

from dapo_components.functional.reductions import BatchCounts
from dapo_components.training.distributed import (
    all_gather,
    all_reduce_counts,
    all_reduce_max,
    all_reduce_maxima,
    all_reduce_sum,
    full_parameters,
    rank_and_world_size,
)
from tests.helpers import tiny_torchtune


def test_one_process_is_rank_0_of_1():
    assert rank_and_world_size() == (0, 1)


def test_counts_are_those_of_the_mask():
    mask = torch.tensor([[[True, True, False], [False, False, False]], [[False] * 3, [False] * 3]])
    counts = all_reduce_counts(mask)
    assert isinstance(counts, BatchCounts)
    assert (int(counts.num_tokens), int(counts.num_sequences), int(counts.num_groups)) == (2, 1, 1)
    assert counts.world_size == 1


def test_reductions_return_what_they_get():
    assert all_reduce_sum({"a": torch.tensor(2.5), "b": 3}) == {"a": 2.5, "b": 3.0}
    assert all_reduce_maxima({"a": -1.0}) == {"a": -1.0}
    assert all_reduce_sum({}) == {}
    assert all_reduce_max(7) == 7


def test_sums_are_exact_beyond_float32():
    assert float(all_reduce_sum({"n": 2**24 + 1})["n"]) == 2**24 + 1


def test_gathering_keeps_the_item():
    item = {"x": [1, 2]}
    assert all_gather(item) == [item]


def test_full_parameters_are_the_models_own_without_a_graph():
    model = tiny_torchtune()
    found = dict(full_parameters(model))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not any(tensor.requires_grad for tensor in found.values())
    assert found["norm.scale"].data_ptr() == dict(model.named_parameters())["norm.scale"].data_ptr()


def test_full_parameters_have_the_names_of_the_model_without_checkpointing():
    plain, wrapped = tiny_torchtune(), tiny_torchtune()
    set_activation_checkpointing(wrapped, auto_wrap_policy={type(wrapped.layers[0])})  # pyright: ignore
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_parameters())
    assert [name for name, _ in full_parameters(wrapped)] == [name for name, _ in plain.named_parameters()]


def test_tied_parameters_come_once():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert [name for name, _ in full_parameters(model)] == ["a.weight"]
