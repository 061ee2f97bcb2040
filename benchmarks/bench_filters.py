"""What a step does to groups before the update: filter, shape, advantage, and joining what several rounds kept."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from dapo_components.advantages import GroupNormalizedAdvantage
from dapo_components.filters import AccuracyBoundsFilter, FilterChain, NonZeroStdFilter
from dapo_components.rewards.overlong import SoftOverlongPunishment

NUM_TOKENS = 64
GROUPS = {"tiny": (16, 8), "paper": (512, 16), "largest": (4096, 16)}


def make_batch(size: tuple[int, int], device: torch.device, *, with_tokens: bool) -> TensorDict:
    """Groups of every difficulty, so that some are all right and some all wrong."""
    generator = torch.Generator().manual_seed(0)
    difficulty = torch.rand(size[0], 1, generator=generator)
    accuracy = (torch.rand(size, generator=generator) < difficulty).float()
    length = torch.randint(1, NUM_TOKENS + 1, size, generator=generator)
    batch = {"accuracy": accuracy, "reward": 2 * accuracy - 1, "response_length": length}
    if with_tokens:
        batch["response_tokens"] = torch.zeros(*size, NUM_TOKENS, dtype=torch.int64)
        batch["rollout_log_prob"] = torch.zeros(*size, NUM_TOKENS)
    return TensorDict(batch, batch_size=size).to(device)


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.benchmark(group="filter and advantage")
def test_filter_and_advantage(timed, device, size):
    batch = make_batch(GROUPS[size], device, with_tokens=False)
    group_filter, estimate = NonZeroStdFilter(), GroupNormalizedAdvantage()
    kept = timed(lambda: estimate(batch[group_filter(batch).keep]))
    assert 0 < kept.batch_size[0] < GROUPS[size][0]


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.benchmark(group="filter alone")
@pytest.mark.parametrize("chained", [False, True])
def test_filter(timed, device, size, chained):
    batch = make_batch(GROUPS[size], device, with_tokens=False)
    group_filter = FilterChain([NonZeroStdFilter(), AccuracyBoundsFilter(lower=0.1, upper=0.9)])
    timed((group_filter if chained else NonZeroStdFilter()), batch)


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.benchmark(group="reward shaping")
def test_shaping(timed, device, size):
    batch = make_batch(GROUPS[size], device, with_tokens=False)
    shape = SoftOverlongPunishment(NUM_TOKENS, NUM_TOKENS // 2)
    timed(lambda: shape(batch.copy()))


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.benchmark(group="filter and join two rounds")
def test_filter_and_join(timed, device, size):
    rounds = [make_batch(GROUPS[size], device, with_tokens=True) for _ in range(2)]
    group_filter = NonZeroStdFilter()
    timed(lambda: torch.cat([batch[group_filter(batch).keep] for batch in rounds]))
