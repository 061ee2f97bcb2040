"""Dynamic sampling: keep a group iff some of its responses are right and some wrong, refill until the batch is full.

Lines 6 to 8 of Algorithm 1 of DAPO (arXiv:2503.14476). Generation runs in rounds; each asks for the groups still
missing, scaled up by the running acceptance rate, and groups beyond the batch wait for the next step instead of being
thrown away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, final

import torch
from tensordict import TensorDict
from torch import Tensor

from dapo_components.collectors.rollout import RolloutCollector
from dapo_components.data.batch import concatenate
from dapo_components.data.loader import PromptLoader
from dapo_components.filters import GroupFilter
from dapo_components.training.metrics import MetricSums

REPORTED_COUNTS = (
    *("gen_batches", "launched", "used", "carried_in", "waiting", "filtered", "stale"),
    *("kept_uninformative", "short_batch"),
)
RolloutSink = Callable[[list[dict[str, Any]]], None]


class DynamicSamplingExhausted(RuntimeError):
    """Too few informative groups within the allowed generation rounds; the message holds the counts."""


@final
class DynamicSamplingCollector:
    """Collect ``prompts_per_step`` groups that pass a filter.

    Groups are taken in dispatch order, so the batch depends on the seed and the data alone, not on timing. The counters
    of every call balance: launched + carried_in = used + waiting + filtered; ``stale`` groups, which waited too long,
    were ``waiting`` in the call before and are not carried in.

    Args:
        rollouts: Generates and scores groups.
        loader: Source of prompts.
        group_filter: Which groups are informative; None keeps all, which switches dynamic sampling off.
        prompts_per_step: Groups per batch of this rank.
        oversampling: Groups launched per missing group in the first round; later the inverse of the acceptance rate.
        max_oversampling: Bound of the same.
        max_gen_batches: Generation rounds per batch; 0 means no limit.
        on_exhausted: ``raise`` :class:`DynamicSamplingExhausted`, go on with a ``smaller_batch``, or fill up with
            groups that failed the filter (``keep_uninformative``).
        max_staleness: Rollout steps that a finished surplus group may wait; 0 drops it at the end of its step.
        rank: This process.
        world_size: Number of processes; group ids interleave over them.
        on_rollouts: Receives the text of every finished group, with ``kept`` and ``filter_reason``.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> from types import SimpleNamespace
        >>> from torchtune.models.llama3_2 import llama3_2
        >>> from dapo_components.data import Prompt
        >>> from dapo_components.filters import NonZeroStdFilter
        >>> from dapo_components.generation import CausalLMGenerator, SamplingParams
        >>> from dapo_components.rewards import RewardSet
        >>> _ = torch.manual_seed(0)
        >>> model = llama3_2(
        ...     vocab_size=9, num_layers=1, num_heads=1, num_kv_heads=1, embed_dim=4, max_seq_len=16, intermediate_dim=4
        ... )
        >>> class Prompts(list):
        ...     fingerprint = "eight digits"
        >>> rollouts = RolloutCollector(
        ...     CausalLMGenerator(model),
        ...     RewardSet({"even": lambda completion_ids, **columns: [1.0 - ids[0] % 2 for ids in completion_ids]}),
        ...     SimpleNamespace(decode=lambda ids, **options: " ".join(map(str, ids))),
        ...     sampling=SamplingParams(max_tokens=5),
        ...     group_size=8,
        ...     seed=0,
        ... )
        >>> loader = PromptLoader(Prompts(Prompt(i, str(i), (i,), {}) for i in range(8)), seed=0)
        >>> collector = DynamicSamplingCollector(rollouts, loader, NonZeroStdFilter(), prompts_per_step=4)
        >>> batch = collector.collect()
        >>> batch.shape, bool(((batch["accuracy"].mean(dim=1) % 1) > 0).all())
        (torch.Size([4, 8]), True)
    """

    def __init__(
        self,
        rollouts: RolloutCollector,
        loader: PromptLoader,
        group_filter: GroupFilter | None,
        *,
        prompts_per_step: int,
        oversampling: float = 1.5,
        max_oversampling: float = 4.0,
        max_gen_batches: int = 10,
        on_exhausted: Literal["raise", "smaller_batch", "keep_uninformative"] = "raise",
        max_staleness: int = 0,
        rank: int = 0,
        world_size: int = 1,
        on_rollouts: RolloutSink | None = None,
    ) -> None:
        if prompts_per_step < 1:
            raise ValueError(f"prompts_per_step must be >= 1, got {prompts_per_step}")
        if not 1.0 <= oversampling <= max_oversampling:
            raise ValueError(f"oversampling must be in [1, max_oversampling={max_oversampling}], got {oversampling}")
        if max_gen_batches < 0 or max_staleness < 0:
            raise ValueError(f"max_gen_batches={max_gen_batches} and max_staleness={max_staleness} must be >= 0")
        if on_exhausted not in ("raise", "smaller_batch", "keep_uninformative"):
            raise ValueError(
                f"on_exhausted must be 'raise', 'smaller_batch' or 'keep_uninformative', got {on_exhausted!r}"
            )
        self.rollouts = rollouts
        self.loader = loader
        self.group_filter = group_filter
        self.prompts_per_step = prompts_per_step
        self.max_oversampling = max_oversampling
        self.max_gen_batches = max_gen_batches
        self.on_exhausted = on_exhausted
        self.max_staleness = max_staleness
        self.on_rollouts = on_rollouts
        self.counts: Counter[str] = Counter()
        self._seen: dict[str, list[Tensor]] = {}
        self._statuses: Counter[str] = Counter()
        self._rank, self._world_size = rank, world_size
        self._waiting: list[tuple[int, TensorDict]] = []  # (step it was generated in, batch of one group)
        self._acceptance = 1.0 / oversampling if group_filter else 1.0
        self._num_launched = 0
        self._step = 0

    def collect(self) -> TensorDict:
        """Return the next batch ``[prompts_per_step, G]``.

        ``counts`` afterwards says what happened to every group of this call.

        Raises:
            DynamicSamplingExhausted: See ``on_exhausted``; accepted groups then wait for the next call.
            GenerationFailed: If the engine fails.
        """
        self.counts, self._seen, self._statuses = Counter(), {}, Counter()
        self._drop_stale()
        rejected: list[TensorDict] = []
        while len(self._waiting) < self.prompts_per_step:
            if self.max_gen_batches and self.counts["gen_batches"] >= self.max_gen_batches:
                self._exhausted(rejected)
                break
            missing = self.prompts_per_step - len(self._waiting)
            factor = min(1.0 / max(self._acceptance, 1e-9), self.max_oversampling)
            rejected += self._round(_round_up(missing * factor))
        taken = self._waiting[: self.prompts_per_step]
        self._waiting = self._waiting[self.prompts_per_step :]
        self.counts["used"] = len(taken)
        self.counts["waiting"] = len(self._waiting)
        self._step += 1
        return concatenate([batch for _, batch in taken], pad_id=self.rollouts.pad_id)

    def report(self, metrics: MetricSums) -> None:
        """Add the counts of the last :meth:`collect`, and what all its responses show before filtering."""
        for name in REPORTED_COUNTS:
            metrics.sum(f"sampling/{name}", float(self.counts[name]))
        for name, count in self._statuses.items():
            metrics.sum(f"rewards/{name}", float(count))
        for name, values in self._seen.items():
            metrics.mean(f"sampling/{name}", torch.cat(values))

    def put_back(self, batch: TensorDict) -> None:
        """Return the batch of the last :meth:`collect` unused, so that the next one starts with it."""
        self._step -= 1
        self._waiting = [(self._step, batch[i : i + 1]) for i in range(batch.shape[0])] + self._waiting

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes between calls: prompts, waiting groups, acceptance rate, ids."""
        return {
            "loader": self.loader.state_dict(),
            "waiting": [(step, batch.clone().to_dict()) for step, batch in self._waiting],
            "acceptance": self._acceptance,
            "num_launched": self._num_launched,
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken."""
        self.loader.load_state_dict(state["loader"])
        size = (1, self.rollouts.group_size)
        waiting_sizes = {batch["reward"].shape[1] for _, batch in state["waiting"]} - {size[1]}
        if waiting_sizes:
            raise ValueError(
                f"group_size must be {waiting_sizes.pop()} as in the saved state, in which groups wait, got {size[1]}"
            )
        self._waiting = [(step, TensorDict(batch, batch_size=size)) for step, batch in state["waiting"]]
        self._acceptance = state["acceptance"]
        self._num_launched = state["num_launched"]
        self._step = state["step"]

    def _round(self, num_groups: int) -> list[TensorDict]:
        """Generate, score and filter ``num_groups`` groups; accepted ones wait, rejected ones are returned."""
        prompts = self.loader.take(num_groups)
        ids = [(self._num_launched + number) * self._world_size + self._rank for number in range(len(prompts))]
        self._num_launched += len(prompts)
        rollouts = self.rollouts.collect(prompts, ids)
        keep, reasons = torch.ones(len(prompts), dtype=torch.bool), [""] * len(prompts)
        if self.group_filter is not None:
            decision = self.group_filter(rollouts.batch)
            keep, reasons = decision.keep, list(decision.reasons)
            self._acceptance = 0.5 * self._acceptance + 0.5 * float(keep.float().mean())
        for component, statuses in rollouts.statuses.items():
            self._statuses.update({f"{component}/{status}": count for status, count in statuses.items()})
        rejected: list[TensorDict] = []
        for group, (kept, reason) in enumerate(zip(keep.tolist(), reasons, strict=True)):
            single = rollouts.batch[group : group + 1]
            if kept:
                self._waiting.append((self._step, single))
            else:
                rejected.append(single)
                self.counts[f"filtered/{reason}"] += 1
        self.counts["gen_batches"] += 1
        self.counts["launched"] += len(prompts)
        self.counts["filtered"] += len(rejected)
        for name, values in (("accuracy", rollouts.batch["accuracy"]), ("kept_share", keep.double())):
            self._seen.setdefault(name, []).append(values.flatten().double())
        self._report(rollouts.records, keep.tolist(), reasons)
        return rejected

    def _report(self, records: list[list[dict[str, Any]]], keep: list[bool], reasons: list[str]) -> None:
        if self.on_rollouts is None:
            return
        for group, kept, reason in zip(records, keep, reasons, strict=True):
            self.on_rollouts([{**row, "kept": kept, "filter_reason": reason} for row in group])

    def _drop_stale(self) -> None:
        fresh = [(step, batch) for step, batch in self._waiting if self._step - step <= self.max_staleness]
        self.counts["stale"] = len(self._waiting) - len(fresh)
        self.counts["carried_in"] = len(fresh)
        self._waiting = fresh

    def _exhausted(self, rejected: list[TensorDict]) -> None:
        accepted, wanted = len(self._waiting), self.prompts_per_step
        reasons = {key.removeprefix("filtered/"): n for key, n in self.counts.items() if key.startswith("filtered/")}
        if self.on_exhausted == "keep_uninformative":
            self._waiting += [(self._step, batch) for batch in rejected[: wanted - accepted]]
            self.counts["filtered"] -= len(self._waiting) - accepted
            self.counts["kept_uninformative"] = len(self._waiting) - accepted
            return
        if self.on_exhausted == "smaller_batch" and accepted:
            self.counts["short_batch"] = 1
            return
        self.counts["waiting"] = accepted
        raise DynamicSamplingExhausted(
            f"{accepted} of {wanted} groups after {self.counts['gen_batches']} generation batches "
            f"({self.counts['launched']} groups launched, dropped: {reasons}); raise max_gen_batches, use prompts "
            "nearer to the policy's ability, or set on_exhausted to smaller_batch or keep_uninformative"
        )


def _round_up(value: float) -> int:
    """Round up, but not for a rounding error: 10 groups at 1.1 are 11, although 10 * 1.1 > 11 in floating point."""
    return math.ceil(value - 1e-9)
