"""An endless, resumable stream of prompts, sharded over ranks."""

from __future__ import annotations

import hashlib
from typing import Any, final

import torch

from dapo_components.data.prompts import Prompt, PromptSource

_RUN_SETTINGS = ("seed", "shuffle", "rank", "world_size")


@final
class PromptLoader:
    """Gives out prompts epoch after epoch, each one once an epoch over all ranks.

    An epoch's order depends on ``(seed, epoch)`` alone. Rank ``r`` takes every ``world_size``-th prompt of it, starting
    at ``(r + epoch) % world_size``: shards are disjoint, none of an epoch's prompts is left out, and where the division
    leaves a remainder the longer shards go round, so that no rank falls behind for good.

    Args:
        dataset: Prompts with ``__len__``, ``__getitem__`` and ``fingerprint``.
        seed: Seed of the order.
        shuffle: New order every epoch; otherwise the data set's own.
        rank: This process.
        world_size: Number of processes.

    Raises:
        ValueError: If the data set is empty or ``rank`` is not in ``[0, world_size)``.

    Example:
        >>> loader = PromptLoader(dataset, seed=0)  # doctest: +SKIP
        >>> prompts = loader.take(8)  # doctest: +SKIP
    """

    def __init__(
        self, dataset: PromptSource, *, seed: int, shuffle: bool = True, rank: int = 0, world_size: int = 1
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be >= 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size={world_size}), got {rank}")
        if len(dataset) < 1:
            raise ValueError("dataset must hold at least one prompt, got none")
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self._start_epoch(0)
        self._finish_epochs()

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0; also the number of epochs this rank has finished."""
        return self._epoch

    def take(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts; a data set of fewer than ``n`` is repeated.

        Raises:
            ValueError: If ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        prompts: list[Prompt] = []
        while len(prompts) < n:
            wanted = self._shard[self._position : self._position + n - len(prompts)]
            prompts.extend(self.dataset[index] for index in wanted)
            self._position += len(wanted)
            self._finish_epochs()
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next prompt depends on."""
        settings = {name: getattr(self, name) for name in _RUN_SETTINGS}
        dataset = {"fingerprint": self.dataset.fingerprint, **_identity(self.dataset)}
        return {"epoch": self._epoch, "position": self._position, **settings, "dataset": dataset}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ValueError: If it belongs to another data set, seed, order, rank or number of ranks; the message says what
                changed.
        """
        self._refuse_other_dataset(state_dict["dataset"])
        for name in _RUN_SETTINGS:
            if state_dict[name] != getattr(self, name):
                raise ValueError(
                    f"{name} must be {state_dict[name]!r} as in the saved loader state, got {getattr(self, name)!r}; "
                    "resume with the saved value or start a new run"
                )
        self._start_epoch(int(state_dict["epoch"]))
        self._position = int(state_dict["position"])
        self._finish_epochs()

    def _refuse_other_dataset(self, saved: dict[str, Any]) -> None:
        if saved["fingerprint"] == self.dataset.fingerprint:
            return
        now = _identity(self.dataset)
        changes = [
            f"{name} ({_brief(saved[name])} -> {_brief(now[name])})"
            for name in now
            if name in saved and saved[name] != now[name]
        ]
        changed = (
            ", ".join(changes) or f"fingerprint ({_brief(saved['fingerprint'])} -> {self.dataset.fingerprint[:12]})"
        )
        raise ValueError(
            f"the saved loader state belongs to another prompt data set; changed: {changed}. "
            "Resume with the data set of the saved run, or start a new run"
        )

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        num_prompts = len(self.dataset)
        order = range(num_prompts)
        if self.shuffle:
            generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
            order = torch.randperm(num_prompts, generator=generator).tolist()
        self._shard = list(order[(self.rank + epoch) % self.world_size :: self.world_size])

    def _finish_epochs(self) -> None:
        """Go on to the next epoch that has a prompt for this rank: with fewer prompts than ranks some have none."""
        while self._position >= len(self._shard):
            self._start_epoch(self._epoch + 1)


def _mix(seed: int, epoch: int) -> int:
    """Hash two integers into a seed, so that seed 1, epoch 0 is not seed 0, epoch 1."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:8], "little") >> 1


def _identity(dataset: PromptSource) -> dict[str, Any]:
    """Return what a fingerprint is made of, where a data set tells."""
    return dict(getattr(dataset, "identity", {}))


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:12] + "..."
