"""The engine protocol: one request per sample, tokens in and tokens out.

A request is one **sample**, not one group, so a short sample frees its slot at once. Text is never re-tokenised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. The trainer must divide its logits by the same ``temperature``.

    Args:
        temperature: Divides the logits; positive.
        max_tokens: Response budget in tokens, stop token and ``prefix_tokens`` of the request included.
        top_p: Nucleus mass kept, in (0, 1].
        top_k: Number of candidates kept; -1 keeps all.
        stop_token_ids: A response ends with the first of these, which it contains.

    Raises:
        ValueError: If a value is outside its range.
    """

    temperature: float = 1.0
    max_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k must be -1 (off) or >= 1, got {self.top_k}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def renormalises(self) -> bool:
        """Whether sampled log-probs differ from the policy's, so that importance ratios would be biased."""
        return self.top_p < 1.0 or self.top_k != -1


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One response to produce.

    Args:
        request_id: Unique among the requests in flight.
        prompt_tokens: Prompt ids, no padding.
        sampling: How to sample.
        seed: Seed of this request alone; the response does not depend on other requests' seeds.
        prefix_tokens: Response tokens that exist already; generation continues after them, and they count against
            ``sampling.max_tokens``.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    prefix_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a request produced; ``prefix_tokens`` are not repeated.

    Args:
        request_id: The request's id.
        tokens: New response ids as sampled, stop token included.
        log_probs: Log-prob of each token under the sampling distribution, after temperature.
        versions: Policy version that produced each token.
        finish_reason: ``stop``, ``length`` (budget used up), ``abort`` or ``error``.
        error: What went wrong, when ``finish_reason`` is ``error``.
    """

    request_id: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    error: str = ""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"request {self.request_id}: {len(self.tokens)} tokens need as many log_probs and versions, "
                f"got {len(self.log_probs)} and {len(self.versions)}"
            )


class Generator(Protocol):
    """An engine that turns requests into completions."""

    version: int
    """Policy version (optimizer steps) of the weights it holds."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        ...

    def step(self) -> list[Completion]:
        """Advance and return what finished since the last call; may be empty."""
        ...

    def abort(self, request_ids: Sequence[int]) -> list[Completion]:
        """Stop requests and return what they have so far, with ``finish_reason="abort"``."""
        ...

    def num_in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Load new weights, by the trainer's parameter names, and take on their version."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...
