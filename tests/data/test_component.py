from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from dapo_components.data.component import Component, read_key


class Doubled(Component):
    def __init__(self, *, in_key: Any = "reward", out_key: Any = "advantage"):
        super().__init__([in_key], [out_key])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        (value,) = self.read(tensordict)
        return self.write(tensordict, 2 * value)


def make_batch(**values):
    return TensorDict({name: torch.tensor(value) for name, value in values.items()}, batch_size=[2])


def test_reads_and_writes_the_keys_it_was_given():
    batch = Doubled()(make_batch(reward=[1.0, -3.0]))
    assert batch["advantage"].tolist() == [2.0, -6.0]


def test_yaml_writes_a_nested_key_as_a_list():
    batch = TensorDict({"rewards": {"math": torch.tensor([1.0, 2.0])}}, batch_size=[2])
    block = Doubled(in_key=["rewards", "math"], out_key=["rewards", "double"])
    assert block.in_keys == [("rewards", "math")]
    assert block(batch)["rewards", "double"].tolist() == [2.0, 4.0]


def test_a_missing_key_names_its_writer_and_what_is_there():
    with pytest.raises(KeyError) as caught:
        Doubled()(make_batch(accuracy=[1.0, 0.0]))
    assert "Doubled needs the key 'reward', which rewards writes; the batch holds ['accuracy']" in str(caught.value)


def test_a_missing_key_of_the_users_own_is_theirs_to_write():
    with pytest.raises(KeyError, match="which your code writes"):
        read_key(make_batch(accuracy=[1.0, 0.0]), "my_score", reader="MyBlock")


def test_as_many_values_as_keys():
    with pytest.raises(ValueError, match="zip"):
        Doubled().write(make_batch(reward=[1.0, 0.0]), torch.zeros(2), torch.zeros(2))
