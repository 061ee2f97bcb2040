r"""Log-probs of tokens and entropies of next-token distributions, in float32 or wider.

Two routes to the same numbers, differentiable for any loss: from logits (:func:`token_log_probs`,
:func:`token_entropy`), where backward allocates the gradient of the logits and nothing else of their size, and from
hidden states (:func:`linear_log_probs`), where the logits of all tokens never exist. Rows that ``mask`` leaves out cost
next to nothing, may hold NaN or inf, and get a gradient of exactly 0, as do rows that the loss ignores.

Shapes: ``...`` any leading dimensions and the positions, ``D`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from dapo_components.functional.head_log_probs import HeadLogProbs
from dapo_components.functional.logits_log_probs import LogitsLogProbs
from dapo_components.functional.reductions import check_mask


@overload
def token_log_probs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    with_entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def token_log_probs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    with_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def token_log_probs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Log-prob of each token, :math:`\log \mathrm{softmax}(x / \tau)_y`.

    Args:
        logits: Logits that predict ``tokens`` (already shifted by one), ``[..., V]``. A view that cannot be flattened
            to rows, such as ``logits[:, :-1]``, is copied: leave positions out with ``mask`` instead.
        tokens: Token ids, ``[...]``, int64.
        temperature: :math:`\tau`, the sampler's; divides the logits.
        chunk_size: Rows worked on at a time; by default as many as fit the processor's cache.
        mask: Boolean, ``[...]``: rows to compute; the others give 0 and their logits and tokens are never read.
        with_entropy: Return the entropies too; their gradient shares the buffer of the log-probs' gradient.

    Returns:
        Log-probs ``[...]``, float32 (float64 for float64 logits), or ``(log_probs, entropy)``.

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If shapes do not fit, a token is outside the vocabulary, or an option is not positive.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0986]])
        >>> token_log_probs(logits, torch.tensor([0, 1]))
        tensor([-0.6931, -0.2877])
    """
    _check_options(temperature, chunk_size)
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"tokens must have the shape of logits without its last dimension, {tuple(logits.shape[:-1])}, "
            f"got {tuple(tokens.shape)}"
        )
    selected = _selected_rows(tokens, mask)
    rows, row_tokens = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)
    _check_tokens(row_tokens, selected, logits.shape[-1])
    log_prob, entropy = LogitsLogProbs.apply(rows, row_tokens, selected, temperature, chunk_size, with_entropy)
    log_prob = _spread(log_prob, None, tokens.shape)
    return (log_prob, _spread(entropy, None, tokens.shape)) if with_entropy else log_prob


def token_entropy(
    logits: Tensor, *, temperature: float = 1.0, chunk_size: int | None = None, mask: Tensor | None = None
) -> Tensor:
    r"""Entropy of each next-token distribution, :math:`-\sum_k p_k \log p_k` with :math:`p = \mathrm{softmax}(x/\tau)`.

    Args:
        logits: Logits, ``[..., V]``; may contain ``-inf``.
        temperature: :math:`\tau`; divides the logits.
        chunk_size: Rows worked on at a time; by default as many as fit the processor's cache.
        mask: Boolean, ``[...]``: rows to compute; the others give 0 and are never read.

    Returns:
        Entropies in nats, ``[...]``, float32 (float64 for float64 logits).

    Raises:
        TypeError: If ``mask`` is not boolean.
        ValueError: If shapes do not fit or an option is not positive.

    Example:
        >>> token_entropy(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]))
        tensor([0.6931, 0.0000])
    """
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    options = {"temperature": temperature, "chunk_size": chunk_size, "mask": mask}
    return token_log_probs(logits, tokens, with_entropy=True, **options)[1]


@overload
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    mask: Tensor | None = None,
    with_entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    mask: Tensor | None = None,
    with_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    mask: Tensor | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Log-prob of each token from hidden states, :math:`\log \mathrm{softmax}((h W^\top + b) / \tau)_y`.

    The same as :func:`token_log_probs` on ``hidden @ weight.T + bias``, in the memory of one tile of logits: neither
    forward nor backward holds a tensor of tokens times vocabulary. Backward makes the logits again, a fourth product of
    the head's size beside the three of the plain route, and skips rows whose gradient is 0. Without gradients nothing
    is kept for backward.

    Half-precision inputs are computed in float32, products and the sums of the gradients included; the gradients have
    the dtypes of their inputs. ``torch.autocast`` has no effect inside.

    Args:
        hidden: Output of the backbone (after its last norm) that predicts ``tokens``, ``[..., D]``.
        weight: Weight of the head, ``[V, D]``; may be a tied embedding. Under FSDP2 the unsharded tensor.
        tokens: Token ids, ``[...]``, int64.
        bias: Bias of the head, ``[V]``.
        temperature: :math:`\tau`, the sampler's; divides the logits.
        chunk_size: Most tokens worked on at a time.
        mask: Boolean, ``[...]``: rows to compute; the others give 0 and are never read.
        with_entropy: Return the entropies too.

    Returns:
        Log-probs ``[...]``, float32 (float64 for float64 inputs), or ``(log_probs, entropy)``.

    Raises:
        TypeError: If ``mask`` is not boolean or ``weight`` is a sharded tensor.
        ValueError: If shapes do not fit, a token is outside the vocabulary, or an option is not positive.

    Example:
        >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 9.0], [1.0986, 9.0]])
        >>> linear_log_probs(hidden, weight, torch.tensor([1]))
        tensor([-0.2877])
    """
    _check_options(temperature, chunk_size)
    _check_head(hidden, weight, bias, tokens)
    selected = _selected_rows(tokens, mask)
    rows, row_tokens = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1)
    _check_tokens(row_tokens, selected, weight.shape[0])
    if selected is not None:
        rows, row_tokens = rows[selected], row_tokens[selected]
    log_prob, entropy = HeadLogProbs.apply(rows, weight, bias, row_tokens, temperature, chunk_size, with_entropy)
    log_prob = _spread(log_prob, selected, tokens.shape)
    return (log_prob, _spread(entropy, selected, tokens.shape)) if with_entropy else log_prob


def _selected_rows(tokens: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    check_mask(mask)
    if mask.shape != tokens.shape:
        raise ValueError(f"mask must have the shape of tokens, {tuple(tokens.shape)}, got {tuple(mask.shape)}")
    return mask.reshape(-1).nonzero().squeeze(1)


def _spread(values: Tensor, selected: Tensor | None, shape: torch.Size) -> Tensor:
    if selected is not None:
        values = values.new_zeros(shape.numel()).index_copy(0, selected, values)
    # No view: FSDP2 cannot hook one that leaves a module.
    return values if values.shape == shape else values.view(shape).clone()


def _check_options(temperature: float, chunk_size: int | None) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; greedy decoding has no log-probs to train on")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")


def _check_tokens(tokens: Tensor, selected: Tensor | None, vocabulary: int) -> None:
    used = tokens if selected is None else tokens[selected]
    if used.numel() > 0:
        low, high = (int(bound) for bound in used.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"tokens must be in [0, {vocabulary}), the vocabulary, got ids from {low} to {high}; "
                "leave padding out with mask"
            )


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        # A DTensor, recognised without importing torch.distributed.
        if hasattr(tensor, "placements"):
            raise TypeError(f"{name} must be a plain tensor, got a sharded {type(tensor).__name__}; unshard it first")
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(
            f"tokens must have the shape of hidden without its last dimension, {tuple(hidden.shape[:-1])}, "
            f"got {tuple(tokens.shape)}"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight must be [V, {hidden.shape[-1]}] to fit hidden, got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}] to fit weight, got {tuple(bias.shape)}")
