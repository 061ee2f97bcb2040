"""Drawing tokens from logits, one reproducible uniform number a token.

Notation: ``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dapo_components.generation.base import SamplingParams

_DRAWS = 64
_VOCAB_BLOCK = 256


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
            self._values += torch.rand(_DRAWS, dtype=torch.float64, generator=self._generator).tolist()
        return self._values[position]


def sample_tokens(
    logits: Tensor, uniforms: Sequence[float], sampling: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    r"""Draw one token a row by inverting the cumulative distribution.

    With :math:`p = \operatorname{softmax}(z / \text{temperature})` in float32, the token is the first :math:`v` with
    :math:`\sum_{w \le v} p_w > u`. A token of probability zero is never drawn, whatever the rounding of the sum.

    Args:
        logits: Raw logits :math:`z`, ``[N, V]``.
        uniforms: The number :math:`u` in [0, 1) of each row.
        sampling: How each row samples. With ``top_p`` or ``top_k`` the distribution is cut and renormalised, and
            the log-probs are those of the renormalised one.

    Returns:
        Tokens ``[N]`` (int64) and their log-probs ``[N]`` (float32), after temperature, both on the CPU. Where a row's
        logits hold NaN or +inf, or only -inf, there is no distribution: the log-prob is NaN and the token meaningless.

    Example:
        >>> params = SamplingParams(max_tokens=1)
        >>> tokens, log_probs = sample_tokens(torch.tensor([[0.0, 0.0, -torch.inf]]), [0.75], [params])
        >>> int(tokens), round(float(log_probs.exp()), 6)
        (1, 0.5)
    """
    scaled = _restrict_rows(_divide_by_temperature(logits.float(), sampling), sampling)
    largest = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled - largest).exp_()
    # Two levels: a running sum over the vocabulary costs as much as all else here. The sums that decide are made on
    # the CPU, in float64 and one entry after the other, on a GPU too: they cannot fall, and few numbers travel.
    blocks = nn.functional.pad(weights, (0, -weights.shape[-1] % _VOCAB_BLOCK)).unflatten(-1, (-1, _VOCAB_BLOCK))
    block_mass = blocks.sum(dim=-1)
    mass = block_mass.cpu().double()
    uniform = torch.tensor(uniforms, dtype=torch.float64)[:, None]
    block, rest = _invert(mass, uniform * mass.sum(dim=-1, keepdim=True))
    row = torch.arange(len(block), device=blocks.device)
    index, _ = _invert(blocks[row, block[:, 0].to(blocks.device)].cpu().double(), rest)
    # The clamp matters only where there is no distribution.
    tokens = (block * _VOCAB_BLOCK + index).clamp_(max=logits.shape[-1] - 1)
    log_total = block_mass.sum(dim=-1, keepdim=True).log()
    log_probs = scaled.gather(-1, tokens.to(scaled.device)) - largest - log_total
    return tokens[:, 0], log_probs[:, 0].cpu()


def _invert(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first entry of each row where the running sum of ``mass`` exceeds ``target``; both ``[N, 1]``.

    Also returns what is left of ``target`` in that entry. The entry found has mass: rounding may put the target at or
    above the sum, so it is kept below, and the running sum does not grow over an entry without mass.
    """
    running = mass.cumsum(dim=-1)
    total = running[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(running, target, right=True).clamp_(max=mass.shape[-1] - 1)
    before = torch.where(index > 0, running.gather(-1, (index - 1).clamp_(min=0)), 0.0)
    return index, target - before


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
