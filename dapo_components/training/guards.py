"""What stops a run in good order: Ctrl-C, gradients that are not finite, a sampler that disagrees with the trainer."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Self, final

from torch import nn
from torch.distributed.tensor import DTensor

from dapo_components.training.distributed import all_reduce_max

_SAME_SIGNAL_SECONDS = 1.0


class RunStopped(RuntimeError):
    """A run that must not go on; the message says why and what to do."""


@final
class InterruptGuard:
    """Turn the first Ctrl-C (or SIGTERM) into a request that the loop honours between steps; the second one interrupts.

    A launcher of several processes passes on the Ctrl-C that they received already, so what follows the first signal
    within a second is the same one.

    Example:
        >>> with InterruptGuard() as guard:
        ...     guard.requested()
        False
    """

    def __init__(self) -> None:
        self._received: float | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def requested(self) -> bool:
        """Whether any rank was asked to stop; a collective, so ranks agree."""
        return bool(all_reduce_max(int(self._received is not None)))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            if time.monotonic() - self._received < _SAME_SIGNAL_SECONDS:
                return
            raise KeyboardInterrupt
        self._received = time.monotonic()
        print(
            "\nstopping after this step, with a checkpoint; press Ctrl-C again to stop at once without one", flush=True
        )


@final
class FiniteGradientGuard:
    """Skip an update whose gradient is not finite, and stop the run when that happens several times in a row.

    Args:
        max_in_a_row: Consecutive skips that stop the run.

    Raises:
        ValueError: If ``max_in_a_row`` is below 1.

    Example:
        >>> import torch
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> FiniteGradientGuard().clip([weight], max_norm=1.0)
        (5.0, True)
    """

    def __init__(self, max_in_a_row: int = 3) -> None:
        if max_in_a_row < 1:
            raise ValueError(f"max_in_a_row must be >= 1, got {max_in_a_row}")
        self.max_in_a_row = max_in_a_row
        self._skipped = 0

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> tuple[float, bool]:
        """Clip the gradient to ``max_norm`` in place, sharded or not.

        Args:
            parameters: Parameters with gradients.
            max_norm: Largest 2-norm over all of them.

        Returns:
            The norm before clipping, and whether to step the optimizer.

        Raises:
            RunStopped: After ``max_in_a_row`` gradients that are not finite.
        """
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(norm):
            self._skipped = 0
            return norm, True
        self._skipped += 1
        if self._skipped >= self.max_in_a_row:
            raise RunStopped(
                f"the gradient norm was {norm} in {self._skipped} updates in a row, which were skipped; resume from "
                "the last checkpoint with a lower learning rate or smaller max_grad_norm"
            )
        return norm, False


def check_sampler_agreement(max_difference: float, *, limit: float) -> None:
    """Stop a run whose sampler and trainer give different log-probs to the same tokens.

    Args:
        max_difference: Largest ``|trainer - sampler|`` over the sampled tokens, in nats.
        limit: Largest allowed difference.

    Raises:
        RunStopped: If the limit is exceeded.

    Example:
        >>> check_sampler_agreement(1e-6, limit=1e-4)
    """
    if not max_difference <= limit:
        raise RunStopped(
            f"sampler and trainer disagree: the log-prob of a sampled token differs by {max_difference:.3g}, more than "
            f"max_log_prob_difference={limit:g}. The policy gradient would be wrong. Usual causes: another "
            "temperature, top_p or top_k in the sampler, weights that did not reach it, or a precision (bf16) that "
            "needs a larger limit"
        )
