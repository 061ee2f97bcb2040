"""What a generator remembers about a request while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dapo_components.generation.base import Completion, FinishReason, GenerationRequest
from dapo_components.generation.sampling import UniformStream

_ROOM = 64


@dataclass(eq=False)
class Row:
    """A request with the tokens drawn so far.

    Args:
        request: The request.
    """

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    error: str = ""
    done: bool = False

    def __post_init__(self) -> None:
        self.sampling = self.request.sampling
        self.response_length = len(self.request.prefix_tokens)
        """Response tokens so far, prefix included."""
        self._prompt_length = len(self.request.prompt_tokens)
        self._uniforms = UniformStream(self.request.seed)
        self._stop = frozenset(self.sampling.stop_token_ids)
        self.requeue()

    def requeue(self) -> None:
        """Take all tokens so far into ``context``: what must go through the model before the next one is drawn."""
        self.context = (*self.request.prompt_tokens, *self.request.prefix_tokens, *self.tokens)

    @property
    def position(self) -> int:
        """Position of the last token, the one whose keys and values are not computed yet."""
        return self._prompt_length + self.response_length - 1

    @property
    def room(self) -> int:
        """Cached positions worth reserving now."""
        return self.position + 1 + min(_ROOM, self.sampling.max_tokens - self.response_length)

    @property
    def uniform(self) -> float:
        """The uniform number that draws the next token."""
        return self._uniforms[self.response_length]

    def append(self, token: int, log_prob: float, version: int) -> FinishReason | None:
        """Add a token and return why the response ends with it, or None."""
        if math.isnan(log_prob):
            self.done = True
            self.error = (
                f"logits at response position {self.response_length} are NaN or infinite under policy version "
                f"{version}; the weights are probably broken"
            )
            return "error"
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        self.response_length += 1
        stopped = token in self._stop
        self.done = stopped or self.response_length >= self.sampling.max_tokens
        return ("stop" if stopped else "length") if self.done else None

    def completion(self, reason: FinishReason) -> Completion:
        """What the request has produced."""
        return Completion(
            request_id=self.request.request_id,
            tokens=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            versions=tuple(self.versions),
            finish_reason=reason,
            error=self.error,
        )


def check_request(request: GenerationRequest, *, vocab_size: int, max_model_len: int | None) -> None:
    """Refuse a request that cannot be answered.

    Raises:
        ValueError: If it has no prompt, ids outside the vocabulary, too little room, a complete response as prefix, or
            a seed outside [0, 2**64).
    """
    name = f"request {request.request_id}"
    sampling = request.sampling
    if not request.prompt_tokens:
        raise ValueError(f"{name}: prompt_tokens must hold at least one token, got none")
    ids = (*request.prompt_tokens, *request.prefix_tokens)
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"{name}: token ids must be in [0, {vocab_size}), the model's vocabulary, got {wrong}")
    if len(request.prefix_tokens) >= sampling.max_tokens:
        raise ValueError(
            f"{name}: prefix_tokens must be shorter than max_tokens={sampling.max_tokens}, which counts them, "
            f"got {len(request.prefix_tokens)}; a response of that length is complete"
        )
    if stops := set(request.prefix_tokens) & set(sampling.stop_token_ids):
        raise ValueError(
            f"{name}: prefix_tokens must not hold a stop token, got {min(stops)}; the response is complete"
        )
    needed = len(request.prompt_tokens) + sampling.max_tokens
    if max_model_len is not None and needed > max_model_len:
        raise ValueError(
            f"{name}: prompt and max_tokens must fit in {max_model_len} positions (max_model_len), got "
            f"{len(request.prompt_tokens)} + {sampling.max_tokens} = {needed}; shorten the prompt or lower max_tokens"
        )
    if not 0 <= request.seed < 2**64:
        raise ValueError(f"{name}: seed must be in [0, 2**64), got {request.seed}")
