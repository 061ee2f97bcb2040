"""Config sections that every recipe of the family shares; a recipe adds its own keys around them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from dapo_components.training.config import check_at_least

Component = dict[str, Any]
"""A mapping with ``_component_``, the dotted path of what to build, beside its arguments."""


@dataclass(kw_only=True)
class DynamicSamplingConfig:
    """Which groups to train on, and how to get enough of them; see ``DynamicSamplingCollector``.

    Args:
        enabled: False trains on every group.
        filter: Group filter, the default keeps groups with some right and some wrong responses.
        oversampling: Groups launched per missing group, until the acceptance rate is known.
        max_oversampling: Bound of the same later on.
        max_gen_batches: Generation rounds per step; 0 means no limit.
        on_exhausted: What to do when they were not enough.
        max_staleness: Rollout steps that a finished surplus group may wait.
    """

    enabled: bool = True
    filter: Component = field(default_factory=lambda: {"_component_": "dapo_components.filters.NonZeroStdFilter"})
    oversampling: float = 1.5
    max_oversampling: float = 4.0
    max_gen_batches: int = 10
    on_exhausted: Literal["raise", "smaller_batch", "keep_uninformative"] = "raise"
    max_staleness: int = 0

    def check_correction(self, loss: Component) -> None:
        """Refuse to train on responses of an older policy with a loss that does not correct for it.

        Raises:
            ValueError: If groups may wait and ``loss`` has no ``rollout_correction``.
        """
        if self.enabled and self.max_staleness > 0 and not loss.get("rollout_correction"):
            raise ValueError(
                f"dynamic_sampling.max_staleness={self.max_staleness} trains on responses of an older policy; set "
                "loss.rollout_correction to weigh them, for example {level: token, mode: truncate, upper: 2.0}, or set "
                "max_staleness: 0"
            )

    def collector_arguments(self) -> dict[str, Any]:
        """Return the fields that ``DynamicSamplingCollector`` takes as they are."""
        return {name: value for name, value in vars(self).items() if name not in ("enabled", "filter")}


@dataclass(kw_only=True)
class KLConfig:
    """Penalty for leaving the initial policy.

    Args:
        coef: Weight; 0, as in DAPO, needs no reference model.
        placement: ``loss`` adds it to the loss, ``reward`` subtracts it from the reward before the group statistics.
        estimator: ``k1``, ``k2``, ``k3`` or ``abs``; see ``kl_penalty``. By default ``k3`` in the loss; in the reward
            ``k1``, the only one that gives the gradient of the reverse KL there.
    """

    coef: float = 0.0
    placement: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "k2", "k3", "abs"] | None = None

    def __post_init__(self) -> None:
        """Refuse a coefficient out of range.

        Raises:
            ValueError: If ``coef`` is negative or not finite.
        """
        if not 0.0 <= self.coef < math.inf:
            raise ValueError(f"kl.coef must be >= 0 and finite, got {self.coef}")

    @property
    def in_reward(self) -> bool:
        """Whether the reward is changed."""
        return self.coef != 0.0 and self.placement == "reward"

    def loss_arguments(self, loss: Component) -> dict[str, Any]:
        """Return what ``loss`` needs to add the penalty; nothing if there is none or it goes into the reward.

        Raises:
            ValueError: If the loss has a coefficient of its own: only ``kl.coef`` loads a reference model.
        """
        if loss.get("kl_coef"):
            raise ValueError(
                f"loss.kl_coef={loss['kl_coef']} must be written as kl.coef, which loads the reference model"
            )
        if self.coef == 0.0 or self.in_reward:
            return {}
        return {"kl_coef": self.coef, "kl_estimator": self.estimator or "k3"}

    def reward_arguments(self) -> dict[str, Any]:
        """Return what ``ReferenceKLPenalty`` needs."""
        return {"coef": self.coef, "estimator": self.estimator or "k1"}


@dataclass(kw_only=True)
class EvaluationConfig:
    """Sampled accuracy on held-out prompts, before training and at the end.

    Args:
        dataset: Held-out prompts.
        every: Also every so many rollout steps; 0 does not.
        num_samples: Responses per prompt.
        pass_at: Values of k for pass@k.
        temperature: Of the sampler.
        top_p: Of the sampler.
    """

    dataset: Component
    every: int = 0
    num_samples: int = 4
    pass_at: list[int] = field(default_factory=lambda: [1, 4])
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse numbers out of range.

        Raises:
            ValueError: If a k of ``pass_at`` is not in ``[1, num_samples]``, or a number is too small.
        """
        check_at_least(self, 1, "num_samples")
        check_at_least(self, 0, "every")
        for k in self.pass_at:
            if not 1 <= k <= self.num_samples:
                raise ValueError(
                    f"evaluation.pass_at must hold numbers in [1, num_samples={self.num_samples}], got {k}"
                )
