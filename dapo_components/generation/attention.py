"""Attention of a causal LM replaced by ours for the length of one forward pass.

A model computes queries, keys and values as always; what it then does with them is handed to an :class:`Attention`
object, which keeps keys and values in its own memory. The model holds no cache and is left as it was found. torchtune's
attention modules call an attribute for this, Hugging Face models look a function up by name.

Notation: ``N`` rows, ``S`` new positions, ``H`` query heads, ``K`` key/value heads, ``C`` head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn

from dapo_components.training.causal_lm import model_kind


class Attention(Protocol):
    """Takes over from the point where a layer has its queries, keys and values."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return the attention output.

        Args:
            layer: Index of the layer.
            query: ``[N, H, S, C]``, positions encoded.
            key: ``[N, K, S, C]``, positions encoded.
            value: ``[N, K, S, C]``.
            scale: Multiplies the scores; ``C ** -0.5`` when None.

        Returns:
            ``[N, H, S, C]``.
        """
        ...


@contextmanager
def attention_replaced(model: nn.Module, attention: Attention) -> Iterator[None]:
    """Let every attention layer of ``model`` call ``attention`` inside the block.

    Raises:
        RuntimeError: If the model went through a forward pass in the block without calling it from every layer.
    """
    counted = _Counting(attention)
    if model_kind(model) == "torchtune":
        with _torchtune_attention(model, counted):
            yield
    else:
        with _huggingface_attention(model, counted):
            yield
    missing = num_layers(model) - len(counted.layers)
    if missing:
        raise RuntimeError(
            f"{missing} of {num_layers(model)} layers of {type(model).__name__} did not use the replaced attention; "
            "the model cannot be sampled with this generator"
        )


def check_attention(model: nn.Module) -> None:
    """Refuse models whose attention does more than scores, softmax and weighted sum.

    Raises:
        ValueError: If there is a cache on the model already, or attention of another kind.
    """
    if model_kind(model) == "huggingface":
        _register_huggingface()
        return
    for index, layer in enumerate(_torchtune_layers(model)):
        attention: Any = getattr(layer, "attn", None)
        if not all(hasattr(attention, name) for name in ("_attention_call", "num_heads", "num_kv_heads")):
            raise ValueError(
                f"layer {index} of the model must be plain self-attention (torchtune MultiHeadAttention), "
                f"got {type(attention).__name__}; use a text-only decoder"
            )
        if attention.kv_cache is not None:
            raise ValueError(
                "the model has torchtune key/value caches set up, ours replace them; build it without them"
            )


def num_layers(model: nn.Module) -> int:
    """Return the number of attention layers."""
    if model_kind(model) == "torchtune":
        return len(_torchtune_layers(model))
    config: Any = model.config
    return int(config.num_hidden_layers)


class _Counting:
    """Remembers which layers called."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.layers: set[int] = set()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        self.layers.add(layer)
        return self.attention.attend(layer, query, key, value, scale)


def _torchtune_layers(model: nn.Module) -> list[Any]:
    decoder: Any = model
    return list(decoder.layers)


@contextmanager
def _torchtune_attention(model: nn.Module, attention: Attention) -> Iterator[None]:
    modules = [layer.attn for layer in _torchtune_layers(model)]
    originals = [module._attention_call for module in modules]
    for index, module in enumerate(modules):
        module._attention_call = _TorchtuneCall(attention, index, module.num_heads // module.num_kv_heads)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module._attention_call = original


class _TorchtuneCall:
    """What torchtune's attention module calls in the place of its own choice of kernel."""

    def __init__(self, attention: Attention, layer: int, queries_per_key: int) -> None:
        self.attention = attention
        self.layer = layer
        self.queries_per_key = queries_per_key

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        # The module has repeated each key/value head for its query heads; one copy is enough.
        step = self.queries_per_key
        return self.attention.attend(self.layer, query, key[:, ::step], value[:, ::step], None)


_ACTIVE: ContextVar[Attention] = ContextVar("dapo_components_attention")
_HUGGINGFACE_NAME = "dapo_components"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


def _register_huggingface() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_HUGGINGFACE_NAME, _huggingface_call)


@contextmanager
def _huggingface_attention(model: nn.Module, attention: Attention) -> Iterator[None]:
    config: Any = model.config
    original = config._attn_implementation
    token = _ACTIVE.set(attention)
    config._attn_implementation = _HUGGINGFACE_NAME
    try:
        yield
    finally:
        config._attn_implementation = original
        _ACTIVE.reset(token)


def _huggingface_call(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    changed = [name for name in _UNSUPPORTED if arguments.get(name) is not None]
    if changed or attention_mask is not None:
        raise ValueError(
            f"attention of {type(module).__name__} uses {changed or ['attention_mask']}, which this generator does not "
            "compute; use another model or engine"
        )
    output = _ACTIVE.get().attend(module.layer_idx, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None
