"""Keys and values of running responses: one slot each, at its own length, without padding.

Notation: ``N`` rows, ``S`` prompt positions, ``H`` query heads, ``K`` key/value heads, ``C`` head width, ``L`` cached
positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_LENGTH_STEP = 16


class SlotCache:
    """Keys and values of every layer, ``[slots, K, length, C]``, grown as needed and then kept.

    Memory follows the longest running response, not the longest allowed one.

    Args:
        num_layers: Attention layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def reserve(self, slots: int, length: int, like: Tensor) -> None:
        """Make room for at least ``slots`` slots of ``length`` positions, keeping what is there.

        Args:
            slots: Number of slots.
            length: Positions of each.
            like: Keys of one layer, ``[*, K, *, C]``, for shape, dtype and device.
        """
        held_slots, held_length = (self.keys[0].shape[0], self.keys[0].shape[2]) if self.keys else (0, 0)
        if slots <= held_slots and length <= held_length:
            return
        # Half as much again, so that a response that grows token by token is copied a few times only.
        length = held_length if length <= held_length else round_up(max(length, held_length * 3 // 2))
        shape = (max(slots, held_slots), like.shape[1], length, like.shape[3])
        for tensors in (self.keys, self.values):
            for layer in range(self.num_layers):
                # Masked positions are multiplied by a weight of zero, so they must hold numbers.
                grown = like.new_zeros(shape)
                if held_slots:
                    grown[:held_slots, :, :held_length] = tensors[layer]
                    tensors[layer] = grown
                else:
                    tensors.append(grown)

    def load(self, prompts: PromptAttention, sources: Sequence[int], slots: Sequence[int]) -> None:
        """Copy prompts into slots that were reserved.

        Args:
            prompts: Prompts that went through the model.
            sources: Row of ``prompts`` for each slot; one row may serve several slots.
            slots: Distinct slots.
        """
        like = prompts.keys[0]
        source, slot = torch.tensor(sources, device=like.device), torch.tensor(slots, device=like.device)
        for ours, theirs in ((self.keys, prompts.keys), (self.values, prompts.values)):
            for layer in range(self.num_layers):
                ours[layer][:, :, : like.shape[2]].index_copy_(0, slot, theirs[layer].index_select(0, source))

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of slots ``sources`` to ``targets``."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[list(targets), :, :length] = tensor[list(sources), :, :length]

    def zero(self, slots: Sequence[int]) -> None:
        """Overwrite slots."""
        if slots:
            for tensor in (*self.keys, *self.values):
                tensor[list(slots)] = 0.0

    def release(self) -> None:
        """Give the memory back."""
        self.keys, self.values = [], []


class PromptAttention:
    """Causal attention over prompts that also keeps their keys and values.

    Prompts are padded on the right: a causal mask alone keeps real tokens from seeing the padding.

    Args:
        num_layers: Attention layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Tensor] = [torch.empty(0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0)] * num_layers

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend within each row; shapes as in :class:`~dapo_components.generation.attention.Attention`."""
        self.keys[layer], self.values[layer] = key.contiguous(), value.contiguous()
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


class TokenAttention:
    """Attention of one new token a row over that row's slot; row ``i`` uses slot ``i``.

    Args:
        cache: Where earlier keys and values are and the new ones go.
        positions: Position of each row's new token, ``[N]``.
        length: Cached positions to look at: more than any of ``positions``.
    """

    def __init__(self, cache: SlotCache, positions: Tensor, length: int) -> None:
        self._cache = cache
        self._positions = positions
        self._length = length
        self._rows = torch.arange(len(positions), device=positions.device)
        self._hidden = torch.arange(length, device=positions.device) > positions[:, None]
        self._bias: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new key and value, then attend to the whole slot.

        The ``H / K`` queries that share a key/value head become positions of that head, so nothing is repeated.
        """
        rows, heads, _, width = query.shape
        groups = key.shape[1]
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        if self._bias is None:
            bias = query.new_zeros(self._hidden.shape).masked_fill(self._hidden, -torch.inf)
            self._bias = bias[:, None, None].expand(rows, 1, heads // groups, self._length)
        output = scaled_dot_product_attention(
            query.reshape(rows, groups, heads // groups, width),
            keys[:rows, :, : self._length],
            values[:rows, :, : self._length],
            attn_mask=self._bias,
            scale=scale,
        )
        return output.reshape(rows, heads, 1, width)


def round_up(length: int) -> int:
    """Round a number of positions up, so that kernels see few different shapes."""
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP
