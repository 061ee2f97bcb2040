from __future__ import annotations

import json

import pytest
import torch

from dapo_components.data.loader import PromptLoader
from dapo_components.data.prompts import Prompt, PromptDataset


class Numbers:
    """Prompts 0 to n - 1."""

    num_dropped: dict[str, int] = {}  # noqa: RUF012 (protocol)

    def __init__(self, n, fingerprint="f"):
        self.n, self.fingerprint = n, fingerprint

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        assert 0 <= index < self.n
        return Prompt(index, str(index), (index,), {})


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


def test_without_shuffling_the_order_is_the_data_sets():
    loader = PromptLoader(Numbers(3), seed=0, shuffle=False)
    assert ids(loader.take(7)) == [0, 1, 2, 0, 1, 2, 0]
    assert loader.epoch == 2


def test_an_epoch_holds_every_prompt_once_and_epochs_differ():
    loader = PromptLoader(Numbers(20), seed=0)
    first, second = ids(loader.take(20)), ids(loader.take(20))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != list(range(20))


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, skipped=0):
        loader = PromptLoader(Numbers(20), seed=seed)
        loader.take(20 * skipped)
        torch.manual_seed(5)  # the global generator has no say
        return ids(loader.take(20))

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0, skipped=1) != order(1)  # epoch 1 of seed 0 is not epoch 0 of seed 1


def test_take_does_not_touch_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    PromptLoader(Numbers(20), seed=0).take(50)
    assert torch.equal(torch.rand(2), expected)


def test_epoch_counts_finished_epochs():
    loader = PromptLoader(Numbers(3), seed=0)
    epochs = []
    for _ in range(7):
        epochs.append(loader.epoch)
        loader.take(1)
    assert epochs == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(("num_prompts", "world_size"), [(12, 4), (10, 4), (7, 2), (3, 4), (1, 3)])
def test_ranks_share_an_epoch_without_overlap_or_loss(num_prompts, world_size):
    loaders = [
        PromptLoader(Numbers(num_prompts), seed=1, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    seen = {epoch: [] for epoch in range(world_size)}
    taken = [0] * world_size
    for rank, loader in enumerate(loaders):
        while loader.epoch < world_size:
            epoch = loader.epoch
            seen[epoch] += ids(loader.take(1))
            taken[rank] += 1
    assert all(sorted(prompts) == list(range(num_prompts)) for prompts in seen.values())
    # After as many epochs as ranks the longer shards have gone round.
    assert taken == [num_prompts] * world_size


def test_a_data_set_smaller_than_the_request_is_repeated():
    loader = PromptLoader(Numbers(2), seed=0)
    taken = ids(loader.take(9))
    assert len(taken) == 9
    assert [sorted(taken[start : start + 2]) for start in (0, 2, 4, 6)] == [[0, 1]] * 4
    assert loader.take(0) == []


@pytest.mark.parametrize("num_taken", [0, 1, 4, 5, 6, 13])  # an epoch has 5: its ends and both their sides
def test_resuming_gives_the_same_next_prompts(num_taken):
    loader = PromptLoader(Numbers(10), seed=7, rank=1, world_size=2)
    loader.take(num_taken)
    state = json.loads(json.dumps(loader.state_dict()))  # survives JSON
    expected = ids(loader.take(17))
    resumed = PromptLoader(Numbers(10), seed=7, rank=1, world_size=2)
    resumed.take(3)
    resumed.load_state_dict(state)
    assert resumed.epoch == num_taken // 5
    assert ids(resumed.take(17)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 8}, "seed must be 7 as in the saved loader state, got 8"),
        ({"shuffle": False}, "shuffle must be True as in the saved"),
        ({"rank": 0}, "rank must be 1 as in the saved"),
        ({"world_size": 3}, "world_size must be 2 as in the saved loader state, got 3"),
    ],
)
def test_another_run_is_refused(changes, message):
    settings = {"seed": 7, "shuffle": True, "rank": 1, "world_size": 2}
    state = PromptLoader(Numbers(10), **settings).state_dict()
    with pytest.raises(ValueError, match=message):
        PromptLoader(Numbers(10), **{**settings, **changes}).load_state_dict(state)


def test_another_fingerprint_is_refused():
    state = PromptLoader(Numbers(10), seed=0).state_dict()
    other = PromptLoader(Numbers(10, fingerprint="g"), seed=0)
    with pytest.raises(ValueError, match=r"belongs to another prompt data set; changed: fingerprint \(f -> g\)"):
        other.load_state_dict(state)
    assert other.epoch == 0


def test_another_data_set_is_refused_with_what_changed(tmp_path, tokenizer):
    path = tmp_path / "train.jsonl"
    path.write_text('{"problem": "1", "answer": "1"}\n{"problem": "2", "answer": "2"}\n')

    def loader(**arguments):
        dataset = PromptDataset(tokenizer, source=path, max_prompt_length=4, **{"template": "plain", **arguments})
        return PromptLoader(dataset, seed=0)

    state = loader().state_dict()
    loader().load_state_dict(state)
    with pytest.raises(ValueError, match=r"changed: template \(\[\"plain\".* -> ") as error:
        loader(template="as_given_boxed").load_state_dict(state)
    assert "rows" not in str(error.value)
    with pytest.raises(ValueError, match=r"changed: number of prompts \(2 -> 1\), rows \(.*\), tokens"):
        loader(limit=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be >= 1, got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must be in \[0, world_size=2\), got 2"),
        ({"rank": -1}, "rank must be in"),
        ({"dataset": Numbers(0)}, "dataset must hold at least one prompt"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptLoader(**{"dataset": Numbers(3), "seed": 0, **arguments})


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        PromptLoader(Numbers(3), seed=0).take(-1)
