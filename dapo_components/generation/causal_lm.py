"""Sampling from a torch causal LM in the same process, with no other package."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import final

import torch
from torch import Tensor, nn

from dapo_components.generation.base import Completion, GenerationRequest
from dapo_components.generation.kv_cache import PromptAttention, SlotCache, round_up
from dapo_components.generation.model_runner import ModelRunner
from dapo_components.generation.request_state import Row, check_request
from dapo_components.generation.sampling import sample_tokens
from dapo_components.generation.shared_prompts import SharedPrompts
from dapo_components.generation.weights import WeightUpdateError, copy_parameters
from dapo_components.training.causal_lm import attention_window, max_model_length

_CLOSED = "the generator is closed; build a new one"


@final
class CausalLMGenerator:
    """Batched sampling with a key/value cache from a torchtune decoder or a Hugging Face causal LM.

    Every running response has a slot of its own at its own length; a finished response gives its slot to the next
    request at once. A prompt that several waiting requests share goes through the model once. One :meth:`step` admits
    what fits and adds one token to every running response.

    **The model stays yours.** It may be the very module being trained: its modes, caches and gradients are touched only
    while a pass runs, and are as before between steps. After changing its parameters call :meth:`update_weights`, which
    skips tensors that are the model's own.

    **Weight update with requests in flight:** allowed. Running responses keep their tokens and continue under the
    new weights, after their keys and values are computed anew; ``Completion.versions`` says which weights drew which
    token.

    **Reproducibility.** A response is a function of weights, prompt, ``sampling`` and ``seed``: each position has
    its own uniform number from the request's seed, so neither the order of submission, nor other requests, nor an
    abort and resume from a prefix, changes the tokens. The one reservation is rounding: kernels for another number of
    rows may round logits differently in the last bits, and a token changes if its uniform number falls between the two
    results: rare in float32, not in bfloat16. The same calls in the same order give the same bits on a CPU.

    **Broken weights.** NaN or infinite logits end a response with ``finish_reason="error"`` and a text in ``error``.

    Args:
        model: torchtune ``TransformerDecoder`` or Hugging Face ``...ForCausalLM`` with whole (unsharded) parameters.
        max_slots: Most responses that run at once; more are queued. Each slot holds keys and values of the longest one.
        prefill_token_budget: Most prompt tokens, padding included, in one forward pass; a longer prompt goes alone.
        max_model_len: Most tokens of prompt and response together; the model's own limit when left out.
        version: Policy version of the weights that ``model`` has now.

    Raises:
        ValueError: If a number is out of range, or the model is of a kind that cannot be sampled this way.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from dapo_components.generation.base import SamplingParams
        >>> config = LlamaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> generator = CausalLMGenerator(LlamaForCausalLM(config), max_slots=2)
        >>> sampling = SamplingParams(max_tokens=3)
        >>> generator.submit([GenerationRequest(request_id=7, prompt_tokens=(1, 2), sampling=sampling, seed=0)])
        >>> done = []
        >>> while generator.num_in_flight():
        ...     done += generator.step()
        >>> done[0].request_id, len(done[0].tokens), done[0].finish_reason
        (7, 3, 'length')
    """

    version: int
    num_decode_passes: int
    """Forward passes of one token a row since the start."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_slots: int = 64,
        prefill_token_budget: int = 8192,
        max_model_len: int | None = None,
        version: int = 0,
    ) -> None:
        for name, value in (("max_slots", max_slots), ("prefill_token_budget", prefill_token_budget)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self._runner = ModelRunner(model)
        limits = [max_model_length(model), attention_window(model), max_model_len]
        self.max_model_len: int | None = min((limit for limit in limits if limit is not None), default=None)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be >= 2 (one prompt and one new token), got {self.max_model_len}")
        self.max_slots = max_slots
        self.version = version
        self.num_decode_passes = 0
        self._waiting: deque[Row] = deque()
        self._slots: list[Row | None] = []
        self._prompts = SharedPrompts(self._runner, prefill_token_budget)
        self._cache = SlotCache(self._runner.num_layers)
        self._unusable = ""

    @property
    def cache_bytes(self) -> int:
        """Memory of the key/value cache; released when the last request leaves."""
        return self._cache.num_bytes

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that went through the model as prompts (padding not counted) since the start."""
        return self._prompts.num_tokens

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; either all of them or, on an error, none.

        Raises:
            ValueError: If an id is taken, a prompt is empty or has ids outside the vocabulary, prompt and budget exceed
                ``max_model_len``, or a prefix is a complete response already.
            RuntimeError: If the last weight update failed, or the generator is closed.
        """
        self._check_usable()
        taken = {row.request.request_id for row in self._rows()}
        for request in requests:
            if request.request_id in taken:
                raise ValueError(f"request_id must be unique among requests in flight, got {request.request_id} again")
            taken.add(request.request_id)
            check_request(request, vocab_size=self._runner.vocab_size, max_model_len=self.max_model_len)
        rows = [Row(request) for request in requests]
        self._waiting.extend(rows)
        self._prompts.expect(row.context for row in rows)

    def step(self) -> list[Completion]:
        """Admit waiting requests into free slots, then add one token to each running response.

        Returns:
            Responses that finished in this step.

        Raises:
            RuntimeError: If the last weight update failed, or the generator is closed.
        """
        self._check_usable()
        finished = self._admit()
        self._close_gaps()
        if self._slots:
            finished += self._decode()
        self._release_if_idle()
        return finished

    def abort(self, request_ids: Sequence[int]) -> list[Completion]:
        """Stop requests and return what they have; ids that are not in flight (any more) are skipped."""
        wanted = set(request_ids)
        running = [row for row in self._slots if row and row.request.request_id in wanted]
        waiting = [row for row in self._waiting if row.request.request_id in wanted]
        self._slots = [None if row in running else row for row in self._slots]
        self._waiting = deque(row for row in self._waiting if row.request.request_id not in wanted)
        self._prompts.forget(row.context for row in waiting)
        self._release_if_idle()
        return [row.completion("abort") for row in (*running, *waiting)]

    def num_in_flight(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._rows())

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy new weights into the model by parameter name; see the class for requests in flight.

        Args:
            named_tensors: Every parameter, under the model's names, whole. The model's own tensors are skipped.
            version: Policy version of these weights.

        Raises:
            WeightUpdateError: If they do not fit. Tensors are copied as they come, so part of the model may be new by
                then; the message says so, and the generator refuses to sample until an update succeeds.
            RuntimeError: If the generator is closed.
        """
        if self._unusable == _CLOSED:
            raise RuntimeError(_CLOSED)
        # Keys and values of the old weights are worthless from here on, even if the update fails half-way.
        self._requeue_running()
        try:
            copy_parameters(self._runner.model, named_tensors)
        except WeightUpdateError as error:
            if error.num_copied:
                self._unusable = f"the model holds a mixture of old and new weights ({error}); update the weights again"
            raise
        except BaseException:
            self._unusable = "a weight update was interrupted, the model may hold a mixture; update the weights again"
            raise
        self._unusable = ""
        self.version = version

    def close(self) -> None:
        """Drop all requests and the cache; the generator cannot be used afterwards."""
        self._waiting.clear()
        self._slots = []
        self._prompts.clear()
        self._cache.release()
        self._unusable = _CLOSED

    def _rows(self) -> list[Row]:
        return [*(row for row in self._slots if row), *self._waiting]

    def _release_if_idle(self) -> None:
        """Give the cache's memory back to the training that comes next; allocating it again costs next to nothing."""
        if not self._rows():
            self._slots = []
            self._cache.release()

    def _check_usable(self) -> None:
        if self._unusable:
            raise RuntimeError(self._unusable)

    def _admit(self) -> list[Completion]:
        """Give free slots to waiting requests, each with its first token drawn from the prompt's logits."""
        finished: list[Completion] = []
        while self._waiting and (free := self._free_slots()):
            rows = list(islice(self._waiting, len(free)))
            self._prompts.run(row.context for row in rows)
            self._reserve_slots(rows)
            finished += self._extend(rows, torch.stack([self._prompts[row.context].logits for row in rows]))
            # Not earlier: an exception above (out of memory, Ctrl-C) must not lose requests.
            for _ in rows:
                self._waiting.popleft()
            self._occupy([row for row in rows if not row.done], free)
            self._prompts.forget(row.context for row in rows)
        return finished

    def _free_slots(self) -> list[int]:
        gaps = [slot for slot, row in enumerate(self._slots) if row is None]
        return gaps + list(range(len(self._slots), self.max_slots))

    def _reserve_slots(self, rows: Sequence[Row]) -> None:
        keys = [self._prompts[row.context].batch.keys[0] for row in rows]
        length = max(*(row.room for row in rows), *(key.shape[2] for key in keys))
        self._cache.reserve(min(self.max_slots, self.num_in_flight()), length, keys[0])

    def _occupy(self, rows: Sequence[Row], free: Sequence[int]) -> None:
        """Put rows into slots and copy their prompts' keys and values there, one batch of prompts at a time."""
        batches: dict[int, tuple[PromptAttention, list[int], list[int]]] = {}
        for row, slot in zip(rows, free, strict=False):
            prompt = self._prompts[row.context]
            self._slots += [None] * (slot + 1 - len(self._slots))
            self._slots[slot] = row
            _, sources, slots = batches.setdefault(id(prompt.batch), (prompt.batch, [], []))
            sources.append(prompt.index)
            slots.append(slot)
        for batch, sources, slots in batches.values():
            self._cache.load(batch, sources, slots)

    def _requeue_running(self) -> None:
        """Send running rows back to the front of the queue; what they have becomes part of their prompt."""
        rows = [row for row in self._slots if row]
        for row in rows:
            row.requeue()
        self._slots = []
        self._prompts.invalidate()
        self._waiting.extendleft(reversed(rows))
        self._prompts.expect(row.context for row in rows)

    def _close_gaps(self) -> None:
        """Move the last rows into free slots, so that running rows are slots 0, 1, 2, ..."""
        sources, targets = [], []
        for slot in range(len(self._slots)):
            while self._slots and self._slots[-1] is None:
                self._slots.pop()
            if slot < len(self._slots) and self._slots[slot] is None:
                sources.append(len(self._slots) - 1)
                targets.append(slot)
                self._slots[slot] = self._slots.pop()
        if sources:
            self._cache.move(sources, targets, max(self._slots[slot].position for slot in targets))

    def _decode(self) -> list[Completion]:
        rows = [row for row in self._slots if row]
        positions = [row.position for row in rows]
        length = round_up(max(positions) + 1)
        self._cache.reserve(len(rows), length, self._cache.keys[0])
        logits = self._runner.run_tokens([row.tokens[-1] for row in rows], positions, self._cache, length)
        self.num_decode_passes += 1
        finished = self._extend(rows, logits)
        # NaN keys and values would spoil the next response in that slot, where they are masked but still multiplied.
        self._cache.zero([slot for slot, row in enumerate(rows) if row.error])
        self._slots = [None if row.done else row for row in rows]
        return finished

    def _extend(self, rows: Sequence[Row], logits: Tensor) -> list[Completion]:
        """Add one token to each row and return the rows that are complete with it."""
        tokens, log_probs = sample_tokens(logits, [row.uniform for row in rows], [row.sampling for row in rows])
        finished: list[Completion] = []
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            reason = row.append(token, log_prob, self.version)
            if reason:
                finished.append(row.completion(reason))
        return finished
