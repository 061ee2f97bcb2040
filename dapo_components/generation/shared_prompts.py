"""Prompts that went through the model, kept as long as a waiting request shares them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dapo_components.generation.kv_cache import PromptAttention
from dapo_components.generation.model_runner import ModelRunner

Context = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that went through the model.

    Args:
        batch: Keys and values of the prompts that ran with it.
        index: Its row there.
        logits: After its last token, ``[V]``.
    """

    batch: PromptAttention
    index: int
    logits: Tensor


class SharedPrompts:
    """Runs each distinct prompt once for all requests that wait for it.

    Args:
        runner: The model.
        token_budget: Most tokens, padding included, in one forward pass; a longer prompt goes alone.
    """

    def __init__(self, runner: ModelRunner, token_budget: int) -> None:
        self._runner = runner
        self._token_budget = token_budget
        self._prompts: dict[Context, Prompt] = {}
        self._demand: Counter[Context] = Counter()
        self.num_tokens = 0
        """Prompt tokens run so far, padding not counted."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, context: Context) -> Prompt:
        """Return a prompt that :meth:`run` ran and :meth:`forget` did not drop."""
        return self._prompts[context]

    def expect(self, contexts: Iterable[Context]) -> None:
        """Note prompts of requests that wait, one entry a request."""
        self._demand.update(contexts)

    def run(self, contexts: Iterable[Context]) -> None:
        """Run the prompts that are not there yet, those of similar length together."""
        missing = sorted(set(contexts) - self._prompts.keys(), key=len)
        while missing:
            count = 1
            while count < len(missing) and (count + 1) * len(missing[count]) <= self._token_budget:
                count += 1
            self._run_together(missing[:count])
            missing = missing[count:]

    def forget(self, contexts: Iterable[Context]) -> None:
        """Note requests that wait no more, and drop prompts that nobody waits for."""
        for context in contexts:
            self._demand[context] -= 1
            if self._demand[context] <= 0:
                del self._demand[context]
                self._prompts.pop(context, None)

    def invalidate(self) -> None:
        """Drop all results, because the weights change; requests go on waiting."""
        self._prompts.clear()

    def clear(self) -> None:
        """Drop everything."""
        self._prompts.clear()
        self._demand.clear()

    def _run_together(self, contexts: Sequence[Context]) -> None:
        attention, logits = self._runner.run_prompts(contexts)
        self.num_tokens += sum(len(context) for context in contexts)
        for index, context in enumerate(contexts):
            self._prompts[context] = Prompt(attention, index, logits[index])
