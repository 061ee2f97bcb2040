"""The two things a trainer and a sampler need from any causal language model: hidden states and the head.

The vocabulary head is by far the widest layer, and only response positions need it. So the model runs up to its final
norm here, and the caller applies the head where it wants. torchtune's ``TransformerDecoder`` and Hugging Face's
``...ForCausalLM`` models are recognised by their attributes; neither package is imported.

Notation: ``N`` rows, ``S`` positions, ``D`` model width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")
ModelKind = Literal["torchtune", "huggingface"]

_LOGIT_CHANGES = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0, "lm_head_multiplier": 1.0}
"""Config entries with which a Hugging Face model changes its logits after the head, and the value that does not."""


def model_kind(model: nn.Module) -> ModelKind:
    """Tell which of the two supported families a model belongs to.

    Raises:
        ValueError: If it is neither.

    Example:
        >>> try:
        ...     model_kind(nn.Linear(2, 2))
        ... except ValueError as error:
        ...     print(str(error).split(";")[0])
        model must be a torchtune TransformerDecoder or a Hugging Face causal LM, got Linear
    """
    if all(hasattr(model, name) for name in ("tok_embeddings", "layers", "norm", "output", "unembed")):
        return "torchtune"
    if all(hasattr(model, name) for name in ("config", "get_output_embeddings", "base_model")):
        return "huggingface"
    raise ValueError(
        f"model must be a torchtune TransformerDecoder or a Hugging Face causal LM, got {type(model).__name__}; "
        "pass the model itself, not a wrapper such as DistributedDataParallel"
    )


def backbone_hidden(
    model: nn.Module, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Run a model up to and including its final norm.

    Args:
        model: A torchtune decoder or a Hugging Face causal LM.
        tokens: Ids, ``[N, S]``.
        positions: Position of each token, ``[N, S]``; 0, 1, 2, ... when left out. They may restart inside a row
            (several sequences packed together, given a mask): positions are limited by the model, ``S`` is not.
        mask: ``[N, S, S]`` bool, True where row ``i`` attends to column ``j``. Every row of the matrix needs one True.
            Plain causal when left out, and then positions must be 0, 1, 2, ...

    Returns:
        Hidden states after the final norm, ``[N, S, D]``, in the model's dtype.

    Raises:
        ValueError: If the model is of neither family, a position is beyond its limit, or a Hugging Face model cannot
            take such a mask (flash attention, or a sliding window shorter than ``S``).
    """
    return forward_with_head(model, tokens, positions, mask, head=lambda hidden, _weight, _bias: hidden)


def forward_with_head(
    model: nn.Module,
    tokens: Tensor,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    head: Callable[[Tensor, Tensor, Tensor | None], Result],
) -> Result:
    """Run a model with ``head`` in the place of its vocabulary projection.

    For a torchtune decoder ``head`` runs inside the model's own ``forward``. That matters under FSDP2, which gathers
    the parameters of the root module (embedding, norm, head) only there: ``weight`` is then the full tensor.

    Args:
        model: See :func:`backbone_hidden`.
        tokens: See :func:`backbone_hidden`.
        positions: See :func:`backbone_hidden`.
        mask: See :func:`backbone_hidden`.
        head: Called once with hidden states ``[N, S, D]``, the head's weight ``[V, D]`` and its bias ``[V]`` or None.

    Returns:
        What ``head`` returns.

    Raises:
        ValueError: See :func:`backbone_hidden`.
    """
    if model_kind(model) == "torchtune":
        with _output_replaced(model, head), _long_rows_allowed(model, tokens, positions):
            return model(tokens, mask=mask, input_pos=positions)
    mask = None if mask is None else huggingface_mask(model, mask)
    backbone: Any = model.base_model
    output = backbone(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False)
    return head(output.last_hidden_state, *head_parameters(model))


def head_parameters(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight ``[V, D]`` and bias ``[V]`` (or None) of the vocabulary head.

    A tied head gives the embedding's own parameter, so gradients of both uses add up in it. Under FSDP2 the parameters
    are ``DTensor`` outside the model's forward; use :func:`forward_with_head` there.

    Raises:
        ValueError: If the head is not a plain linear layer, so that weight and bias do not give its logits.
    """
    if model_kind(model) == "torchtune":
        output: Any = model.output
        output = getattr(output, "tied_module", output)
    else:
        _refuse_changed_logits(model)
        output = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if not isinstance(output, nn.Linear | nn.Embedding):
        raise ValueError(
            f"the vocabulary head must be a linear layer or tied to the embedding, got {type(output).__name__}; "
            "merge adapters into the head first"
        )
    return output.weight, getattr(output, "bias", None)


def max_model_length(model: nn.Module) -> int | None:
    """Return the number of positions a model can tell apart, or None where it states no limit."""
    owner = model if model_kind(model) == "torchtune" else model.config
    limit: Any = getattr(owner, "max_seq_len", None) or getattr(owner, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def attention_window(model: nn.Module) -> int | None:
    """Return how many positions back the most short-sighted layer looks, or None where all see everything."""
    config: Any = getattr(model, "config", None)
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def huggingface_mask(model: nn.Module, mask: Tensor) -> Tensor:
    """Turn a bool mask ``[N, S, K]`` into the 4-D form a Hugging Face model takes over unchanged.

    Raises:
        ValueError: If its attention implementation ignores such masks, or it has a sliding window shorter than ``K``.
    """
    window = attention_window(model)
    if window is not None and mask.shape[-1] > window:
        raise ValueError(
            f"the model attends to the last {window} positions only, which an explicit mask cannot express per layer; "
            f"got {mask.shape[-1]} positions, use at most {window}"
        )
    config: Any = model.config
    implementation = config._attn_implementation
    if implementation == "sdpa":
        return mask[:, None]
    if implementation == "eager":
        dtype = next(model.parameters()).dtype
        blocked = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
        return torch.where(mask[:, None], torch.zeros_like(blocked), blocked)
    raise ValueError(
        f"attention implementation must be sdpa or eager to take a mask, got {implementation!r}; "
        'call model.set_attn_implementation("sdpa")'
    )


@contextmanager
def _output_replaced(model: nn.Module, head: Callable[[Tensor, Tensor, Tensor | None], Any]) -> Iterator[None]:
    """Let a torchtune decoder's ``forward`` end in the final norm and ``head``."""
    decoder: Any = model
    decoder.unembed = lambda hidden: head(decoder.norm(hidden), *head_parameters(model))
    try:
        yield
    finally:
        del decoder.unembed  # the class's method shows again


@contextmanager
def _long_rows_allowed(model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Iterator[None]:
    """Check the positions of a packed row instead of its length, which is what limits a torchtune decoder."""
    limit = max_model_length(model)
    if limit is None or tokens.shape[1] <= limit:
        yield
        return
    largest = tokens.shape[1] - 1 if positions is None else int(positions.max())
    if largest >= limit:
        raise ValueError(f"positions must be < max_seq_len={limit} of the model, got {largest}; shorten the sequences")
    decoder: Any = model
    decoder.max_seq_len = tokens.shape[1]
    try:
        yield
    finally:
        decoder.max_seq_len = limit


def _refuse_changed_logits(model: nn.Module) -> None:
    for name, neutral in _LOGIT_CHANGES.items():
        value = getattr(model.config, name, None)
        if value is not None and value != neutral:
            raise ValueError(
                f"the model changes its logits after the head ({name}={value}), which weight and bias cannot express; "
                f"use a model without {name}"
            )
