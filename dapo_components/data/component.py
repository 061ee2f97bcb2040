"""The one base class of all blocks: named keys in, named keys out, and errors that say what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from dapo_components.data.keys import BATCH_KEYS, Key


class Component(TensorDictModuleBase):
    """A block that reads ``in_keys`` from a batch and writes ``out_keys`` to it.

    Subclasses are final, hold no arithmetic and call a function of :mod:`dapo_components.functional` in ``forward``.

    Args:
        in_keys: Keys that :meth:`read` returns, in order.
        out_keys: Keys that :meth:`write` fills, in order.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> class Doubled(Component):
        ...     def forward(self, tensordict):
        ...         (reward,) = self.read(tensordict)
        ...         return self.write(tensordict, 2 * reward)
        >>> batch = TensorDict({"reward": torch.ones(2)}, batch_size=[2])
        >>> Doubled(["reward"], ["advantage"])(batch)["advantage"]
        tensor([2., 2.])
    """

    def __init__(self, in_keys: Sequence[Key], out_keys: Sequence[Key]) -> None:
        super().__init__()
        self.in_keys = [as_key(key) for key in in_keys]  # pyright: ignore[reportAttributeAccessIssue]
        self.out_keys = [as_key(key) for key in out_keys]  # pyright: ignore[reportAttributeAccessIssue]

    def read(self, tensordict: TensorDictBase) -> tuple[Tensor, ...]:
        """Return the tensors at ``in_keys``.

        Raises:
            KeyError: If one is missing; the message names it, its writer and the keys that are there.
        """
        reader = str(type(self).__name__)
        return tuple(read_key(tensordict, as_key(key), reader=reader) for key in self.in_keys)  # pyright: ignore[reportArgumentType]

    def write(self, tensordict: TensorDictBase, *values: Tensor) -> TensorDictBase:
        """Store ``values`` at ``out_keys`` and return ``tensordict``."""
        for key, value in zip(self.out_keys, values, strict=True):
            tensordict[key] = value
        return tensordict


def read_key(tensordict: TensorDictBase, key: Key, *, reader: str) -> Tensor:
    """Return ``tensordict[key]`` or explain who should have written it.

    Raises:
        KeyError: If the key is missing.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> read_key(TensorDict({"reward": torch.ones(2)}, batch_size=[2]), "reward", reader="my block")
        tensor([1., 1.])
    """
    value = tensordict.get(key, default=None)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if value is None:
        name = key if isinstance(key, str) else key[0]
        written_by = BATCH_KEYS[name].written_by if name in BATCH_KEYS else "your code"
        present = sorted(map(str, tensordict.keys()))
        raise KeyError(f"{reader} needs the key {key!r}, which {written_by} writes; the batch holds {present}")
    return value


def as_key(key: Key | Sequence[str]) -> Key:
    """Let YAML write a nested key as a list."""
    return key if isinstance(key, str) else tuple(key)
