"""Filter decisions and chains."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict

from dapo_components.filters import AccuracyBoundsFilter, FilterChain, FilterDecision, NonZeroStdFilter

# Six groups: all wrong, 1 of 4, 2 of 4, 3 of 4, all right, all wrong.
ACCURACY = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).float()


def test_decision_counts():
    decision = FilterDecision(torch.tensor([True, False, False, True, False]), ["", "b", "a", "", "b"])
    assert decision.num_kept == 2
    assert decision.dropped == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("keep", "reasons", "message"),
    [
        ([True, False], [""], "one reason per group, got shape \\(2,\\) and 1 reasons"),
        ([True, False], ["", ""], r"group 1 must have a reason because keep\[1\] is False, got ''"),
        ([True, True], ["", "late"], r"group 1 must have no reason because keep\[1\] is True, got 'late'"),
        ([[True, False]], ["", "late"], "shape"),
    ],
)
def test_inconsistent_decisions_are_refused(keep, reasons, message):
    with pytest.raises(ValueError, match=message):
        FilterDecision(torch.tensor(keep), reasons)


def test_a_decision_is_boolean():
    with pytest.raises(TypeError, match=r"torch\.bool"):
        FilterDecision(torch.tensor([1, 0]), ["", "late"])


def test_a_chain_keeps_what_every_filter_keeps_and_the_first_reason_counts():
    batch = TensorDict({"accuracy": ACCURACY}, batch_size=[6, 4])
    decision = FilterChain([NonZeroStdFilter(), AccuracyBoundsFilter(lower=0.25, upper=0.75)])(batch)
    assert decision.keep.tolist() == [False, False, True, False, False, False]
    assert decision.reasons == [
        "accuracy all 0",
        "mean accuracy <= 0.25",
        "",
        "mean accuracy >= 0.75",
        "accuracy all 1",
        "accuracy all 0",
    ]
    swapped = FilterChain([AccuracyBoundsFilter(lower=0.25, upper=0.75), NonZeroStdFilter()])(batch)
    assert swapped.keep.tolist() == decision.keep.tolist()
    assert swapped.dropped == {"mean accuracy <= 0.25": 3, "mean accuracy >= 0.75": 2}


def test_an_empty_chain_keeps_everything():
    decision = FilterChain([])(TensorDict({"accuracy": ACCURACY}, batch_size=[6, 4]))
    assert decision.keep.tolist() == [True] * 6
    assert decision.dropped == {}


def test_a_chain_takes_any_callable():
    def every_second(batch):
        keep = torch.arange(batch.batch_size[0]) % 2 == 0
        return FilterDecision(keep, ["" if kept else "odd" for kept in keep.tolist()])

    batch = TensorDict({"accuracy": ACCURACY}, batch_size=[6, 4])
    assert FilterChain([every_second, NonZeroStdFilter()])(batch).keep.tolist() == [False, False, True] + [False] * 3
    with pytest.raises(ValueError, match=r"filters\[1\] must be callable"):
        FilterChain([every_second, cast(Any, "nonzero_std")])


def test_applying_a_decision_is_one_index():
    batch = TensorDict({"accuracy": ACCURACY, "group_id": torch.arange(6).unsqueeze(1).expand(6, 4)}, batch_size=[6, 4])
    kept: Any = batch[NonZeroStdFilter()(batch).keep]
    assert kept.batch_size == (3, 4)
    assert kept["group_id"][:, 0].tolist() == [1, 2, 3]
