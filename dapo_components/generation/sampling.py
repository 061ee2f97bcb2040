"""Drawing tokens from logits, one reproducible uniform number a token.

Notation: ``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dapo_components.generation.base import SamplingParams

_BLOCK = 64


class UniformStream:
    """The uniform numbers in [0, 1) of one request, addressed by response position.

    Position ``p`` has the same number whatever was asked before, so a request resumed from a prefix continues where it
    was interrupted. Numbers come from a ``torch.Generator`` in blocks of fixed size, which does not depend on how torch
    fills tensors of different sizes.

    Args:
        seed: Seed of the request, in [0, 2**64).

    Raises:
        ValueError: If the seed is outside that range.

    Example:
        >>> UniformStream(3)[70] == UniformStream(3)[70]
        True
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {seed}")
        # torch's CPU generator looks at the low 32 bits only: without folding, seeds equal there would be one stream.
        self._generator = torch.Generator().manual_seed((seed ^ (seed >> 32)) & 0xFFFFFFFF)
        self._values: list[float] = []

    def __getitem__(self, position: int) -> float:
        """Return the number of a response position."""
        while len(self._values) <= position:
            self._values += torch.rand(_BLOCK, dtype=torch.float64, generator=self._generator).tolist()
        return self._values[position]


def sample_tokens(
    logits: Tensor, uniforms: Sequence[float], sampling: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    r"""Draw one token a row by inverting the cumulative distribution.

    With :math:`p = \operatorname{softmax}(z / \text{temperature})` in float32, the token is the first :math:`v` with
    :math:`\sum_{w \le v} p_w > u`. A token of probability zero is never drawn.

    Args:
        logits: Raw logits :math:`z`, ``[N, V]``.
        uniforms: The number :math:`u` in [0, 1) of each row.
        sampling: How each row samples. With ``top_p`` or ``top_k`` the distribution is cut and renormalised, and
            the log-probs are those of the renormalised one.

    Returns:
        Tokens ``[N]`` (int64) and their log-probs ``[N]`` (float32), after temperature. Where a row's logits hold NaN
        or +inf, or only -inf, there is no distribution: the log-prob is NaN and the token meaningless.

    Example:
        >>> params = SamplingParams(max_tokens=1)
        >>> tokens, log_probs = sample_tokens(torch.tensor([[0.0, 0.0, -torch.inf]]), [0.75], [params])
        >>> int(tokens), round(float(log_probs.exp()), 6)
        (1, 0.5)
    """
    scaled = _restrict_rows(_divide_by_temperature(logits.float(), sampling), sampling)
    log_probs = scaled.log_softmax(dim=-1)
    cumulative = log_probs.exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    uniform = torch.tensor(uniforms, dtype=torch.float32, device=logits.device)[:, None]
    # Below the total, even where float32 rounds u up to 1: the search then ends at a token that adds mass.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    chosen = log_probs.gather(-1, tokens)
    if logits.is_cuda:
        # A parallel cumulative sum need not be monotone in its last bit.
        impossible = chosen == -torch.inf
        tokens = torch.where(impossible, log_probs.argmax(dim=-1, keepdim=True), tokens)
        chosen = log_probs.gather(-1, tokens)
    return tokens[:, 0], torch.where(total.isfinite(), chosen, torch.nan)[:, 0]


def restrict_logits(logits: Tensor, *, top_k: int = -1, top_p: float = 1.0) -> Tensor:
    """Set logits outside the ``top_k`` largest, then outside the nucleus of mass ``top_p``, to -inf.

    The nucleus is the smallest set of most probable tokens whose probabilities, taken after ``top_k``, add up to at
    least ``top_p``; it holds at least one token. Tokens as large as the smallest of the ``top_k`` stay too.

    Args:
        logits: ``[N, V]``, temperature already applied.
        top_k: Number of candidates; -1 keeps all.
        top_p: Mass of the nucleus, in (0, 1]; 1 keeps all.

    Example:
        >>> restrict_logits(torch.tensor([[0.5, 0.3, 0.2]]).log(), top_p=0.6).exp()
        tensor([[0.5000, 0.3000, 0.0000]])
    """
    if top_k != -1 and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= top_p
        outside[:, 0] = False
        logits = logits.scatter(-1, order, ordered.masked_fill(outside, -torch.inf))
    return logits


def _divide_by_temperature(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    temperatures = [params.temperature for params in sampling]
    if all(value == 1.0 for value in temperatures):
        return logits
    return logits / torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]


def _restrict_rows(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Apply each row's ``top_k`` and ``top_p``, rows with equal settings together."""
    groups: dict[tuple[int, float], list[int]] = {}
    for row, params in enumerate(sampling):
        if params.renormalises:
            groups.setdefault((params.top_k, params.top_p), []).append(row)
    if not groups:
        return logits
    logits = logits.clone()
    for (top_k, top_p), rows in groups.items():
        logits[rows] = restrict_logits(logits[rows], top_k=top_k, top_p=top_p)
    return logits
