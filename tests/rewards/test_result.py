from __future__ import annotations

import math

import pytest

from dapo_components.rewards import RewardResult


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_is_finite(score):
    with pytest.raises(ValueError, match="score must be finite"):
        RewardResult(score=score, correct=False)


def test_defaults_say_that_nothing_went_wrong():
    result = RewardResult(score=-1.0, correct=False)
    assert (result.status, result.extracted, result.error) == ("ok", None, None)
