"""How prompts, responses, optimizer steps and ranks divide."""

from __future__ import annotations

from typing import Any

import pytest

from dapo_components.data.packing import plan_micro_batches
from dapo_components.training.batch_arithmetic import BatchArithmetic

PAPER: dict[str, Any] = {
    "prompts_per_step": 512,
    "group_size": 16,
    "responses_per_update": 512,
    "max_prompt_length": 2048,
    "max_response_length": 20480,
    "max_tokens_per_micro_batch": 32768,
}


def arithmetic(**changes: Any) -> BatchArithmetic:
    return BatchArithmetic(**{**PAPER, **changes})


def test_the_papers_batch_makes_16_updates_of_32_prompts():
    sizes = arithmetic()
    assert sizes.responses_per_step == 8192
    assert sizes.update_size == 512
    assert sizes.updates_per_rollout == 16
    assert sizes.prompts_per_update_and_rank == 32
    assert sizes.max_sequence_length == 22528


def test_ranks_share_prompts_and_several_epochs_multiply_updates():
    sizes = arithmetic(world_size=8, epochs_per_rollout=3)
    assert (sizes.prompts_per_rank, sizes.prompts_per_update_and_rank) == (64, 4)
    assert (sizes.updates_per_epoch, sizes.updates_per_rollout) == (16, 48)


def test_without_responses_per_update_the_rollout_is_one_update():
    sizes = arithmetic(responses_per_update=None)
    assert (sizes.update_size, sizes.updates_per_rollout) == (8192, 1)


@pytest.mark.parametrize("name", [*PAPER, "epochs_per_rollout", "world_size"])
def test_every_number_must_be_positive(name):
    with pytest.raises(ValueError, match=f"^{name} must be >= 1, got 0$"):
        arithmetic(**{name: 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompts_per_step": 10, "world_size": 4, "responses_per_update": None},
            "prompts_per_step=10 must be a multiple of the 4 ranks; take 12",
        ),
        (
            {"responses_per_update": 500},
            "responses_per_update=500 must divide prompts_per_step * group_size = 512 * 16 = 8192 and be a multiple of "
            "group_size=16, so that groups stay whole",
        ),
        ({"responses_per_update": 8}, "and be a multiple of group_size=16"),
        ({"responses_per_update": 16384}, "responses_per_update=16384 must divide"),
        (
            {"responses_per_update": 64, "world_size": 8},
            "responses_per_update=64 is 4 groups, which 8 ranks cannot share evenly; take a multiple of 128",
        ),
        (
            {"max_tokens_per_micro_batch": 22527},
            "max_tokens_per_micro_batch=22527 cannot hold one sequence of max_prompt_length + max_response_length = "
            "22528 tokens; raise it",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_numbers(changes, message):
    with pytest.raises(ValueError, match=r"must|cannot") as caught:
        arithmetic(**changes)
    assert message in str(caught.value)


def test_the_largest_sequence_may_fill_the_micro_batch():
    assert arithmetic(max_tokens_per_micro_batch=22528).max_sequence_length == 22528


def test_describe_states_every_number():
    text = arithmetic(world_size=8, epochs_per_rollout=2).describe()
    assert text.splitlines() == [
        "prompts per step                     512 (64 per rank, 8 ranks)",
        "responses per step                 8,192 (groups of 16)",
        "optimizer steps per rollout           32 (2 passes of 16)",
        "responses per optimizer step         512 (64 per rank)",
        "longest sequence                  22,528 tokens (prompt 2,048 + response 20,480)",
        "tokens per micro-batch            32,768 at most, per rank; at most 64 passes per optimizer step if every "
        "response is as long as allowed",
    ]


@pytest.mark.parametrize(("max_tokens", "passes"), [(10, 12), (19, 12), (20, 6), (29, 6), (30, 4), (1000, 1)])
def test_the_stated_number_of_passes_is_what_the_plan_needs_at_worst(max_tokens, passes):
    sizes = BatchArithmetic(
        prompts_per_step=4,
        group_size=3,
        max_prompt_length=4,
        max_response_length=6,
        max_tokens_per_micro_batch=max_tokens,
    )
    assert f"at most {passes} passes" in sizes.describe()
    # A response of 7 tokens feeds 10 with its prompt; sharing off is the worst case.
    plan = plan_micro_batches(
        [4] * 12, [7] * 12, [index // 3 for index in range(12)], max_tokens=max_tokens, max_shared_length=1
    )
    assert len(plan) == passes
