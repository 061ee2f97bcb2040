"""Overlong filtering: the loss mask, and where in the order of a step it belongs."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from dapo_components.filters import OverlongFilter


def make_batch():
    return TensorDict(
        {
            "loss_mask": torch.tensor([[[True, True, False], [True, True, True]]]),
            "truncated": torch.tensor([[False, True]]),
            "response_mask": torch.tensor([[[True, True, False], [True, True, True]]]),
        },
        batch_size=[1, 2],
    )


def test_truncated_rows_leave_the_loss():
    batch = make_batch()
    before = batch["loss_mask"]
    OverlongFilter()(batch)
    assert batch["loss_mask"].tolist() == [[[True, True, False], [False, False, False]]]
    # The tensor is replaced, not overwritten: it may be the response mask itself.
    assert before.tolist() == [[[True, True, False], [True, True, True]]]
    assert batch["response_mask"].sum(dim=-1).tolist() == [[2, 3]]


def test_a_response_as_long_as_the_limit_but_finished_stays():
    batch = make_batch()
    batch["truncated"] = torch.zeros(1, 2, dtype=torch.bool)
    assert OverlongFilter()(batch)["loss_mask"].tolist() == [[[True, True, False], [True, True, True]]]


def test_keys_and_plain_tensors():
    batch = make_batch()
    mask = OverlongFilter()(loss_mask=batch["loss_mask"], truncated=batch["truncated"])
    assert mask.sum().item() == 2
    renamed = TensorDict({"m": {"loss": batch["loss_mask"]}, "cut": batch["truncated"]}, batch_size=[1, 2])
    OverlongFilter(mask_key=("m", "loss"), truncated_key="cut")(renamed)
    assert torch.equal(renamed["m", "loss"], mask)


def test_missing_and_wrong_inputs():
    with pytest.raises(KeyError, match="OverlongFilter needs the key 'truncated', which collector writes"):
        OverlongFilter()(make_batch().exclude("truncated"))
    batch = make_batch()
    batch["truncated"] = batch["truncated"].long()
    with pytest.raises(TypeError, match=r"truncated must be a tensor of dtype torch\.bool"):
        OverlongFilter()(batch)
