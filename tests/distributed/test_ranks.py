"""Two gloo processes with unequal work give the numbers of one process. One spawn for all tests here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from dapo_components.losses import DAPOLoss
from tests.distributed.ranks import MODES, full_gradients, masked_batch, whole_batch, work
from tests.helpers import tiny_torchtune
from tests.helpers_training import reference_log_probs

Tensors = Mapping[str, torch.Tensor]
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """Results of rank 0 and rank 1."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (folder,), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


def one_process(which: str, mode: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch at once, one sequence at a time, nothing packed or sharded."""
    model, batch = tiny_torchtune(seed=4), masked_batch(which)
    batch["log_prob"] = reference_log_probs(model, batch)
    loss = DAPOLoss(aggregation=mode)(batch).loss
    loss.backward()
    return float(loss.detach()), full_gradients(model)


def assert_equal(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = 2e-6
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=tolerance)


def test_the_ranks_have_unequal_work(ranks):
    tokens = [int(whole_batch()["loss_mask"][half].sum()) for half in (slice(0, 2), slice(2, 4))]
    assert tokens == [44, 5]
    assert [rank["rank_and_world_size"] for rank in ranks] == [(0, 2), (1, 2)]
    # Rank 1 has one micro-batch of its own and idles through the others.
    assert ranks[0]["splits"]["all/token_mean"]["passes"] == ranks[1]["splits"]["all/token_mean"]["passes"] >= 4


@pytest.mark.parametrize("mode", MODES)
def test_gradients_and_loss_of_unequal_ranks(ranks, mode):
    loss, gradients = one_process("all", mode)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-2
    for rank in ranks:
        assert_equal(rank["splits"][f"all/{mode}"]["gradients"], gradients)
    # Each rank's loss is multiplied by the number of ranks, because FSDP averages gradients.
    assert sum(rank["splits"][f"all/{mode}"]["loss"] for rank in ranks) / 2 == pytest.approx(loss, abs=1e-6)


def test_a_rank_without_a_token_takes_part(ranks):
    loss, gradients = one_process("rank 0", "token_mean")
    assert ranks[1]["splits"]["rank 0/token_mean"]["loss"] == 0.0
    assert ranks[0]["splits"]["rank 0/token_mean"]["loss"] / 2 == pytest.approx(loss, abs=1e-6)
    for rank in ranks:
        assert_equal(rank["splits"]["rank 0/token_mean"]["gradients"], gradients)


def test_no_token_anywhere_is_no_pass(ranks):
    for rank in ranks:
        assert rank["splits"]["none/token_mean"] == {"loss": 0.0, "passes": 0, "gradients": {}}


def test_log_probs_of_a_sharded_model(ranks):
    with torch.no_grad():
        expected = reference_log_probs(tiny_torchtune(seed=4), whole_batch())
    torch.testing.assert_close(torch.cat([rank["log_probs"] for rank in ranks]), expected, rtol=0, atol=1e-5)


def test_counts_are_those_of_the_whole_step(ranks):
    assert [rank["counts"] for rank in ranks] == [[49.0, 11.0, 4.0, 2]] * 2


def test_full_parameters_are_gathered_under_plain_names(ranks):
    expected = dict(tiny_torchtune(seed=4).named_parameters())
    for rank in ranks:
        assert rank["is_sharded"]
        assert_equal(rank["parameters"], expected, tolerance=0.0)


def test_plain_collectives(ranks):
    for rank in ranks:
        assert rank["reduced"] == [11.0, 5]
        assert rank["gathered"] == [{"rank": 0}, {"rank": 1}]


def test_metrics_with_different_names_on_each_rank(ranks):
    for rank in ranks:
        metrics = dict(rank["metrics"])
        assert math.isnan(metrics.pop("broken"))
        assert math.isnan(metrics.pop("also_broken"))
        assert metrics == {
            "mean": 4.0,  # of 1, 2, 3 and 10; the mean of means would be 6
            "share": 0.5,
            "largest": 1.0,
            "only_rank_0": 4.0,
            "sum_of_rank_0": 7.0,
            "largest_of_rank_0": -3.0,
        }


def test_ranks_agree_to_stop(ranks):
    assert [rank["interrupted"] for rank in ranks] == [[False, True]] * 2


def test_no_rank_goes_on_when_one_found_no_informative_group(ranks):
    for rank in ranks:
        found = rank["collected"]
        assert len(found["failures"]) == 2
        assert all(text.startswith("rank 1: 0 of 1 groups after 1 generation batches") for text in found["failures"])
        assert found["reasons"] == [("exhausted", False)] * 2
    # Rank 0's first batch was put back twice and not drawn anew.
    assert [rank["collected"]["batch"] for rank in ranks] == [[0], [5]]


def test_a_checkpoint_is_whole_or_refused_on_every_rank(ranks):
    for rank in ranks:
        first, failure, kept = rank["saved_together"]
        assert (first, kept) == ("step_000001", "step_000001")
        assert "checkpoint of step 2 could not be written" in failure
        assert "OSError: disk full" in failure


def test_weights_and_optimizer_state_survive_a_round_trip(ranks):
    model = tiny_torchtune(seed=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(max_norm: float) -> float:
        optimizer.zero_grad()
        batch = whole_batch()
        batch["log_prob"] = reference_log_probs(model, batch)
        DAPOLoss()(batch).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return float(norm)

    norm = step(0.1)
    assert norm > 0.2  # clipping changes the step
    results = [rank["two_steps"] for rank in ranks]
    assert [result["norm"] for result in results] == pytest.approx([norm, norm], rel=1e-4)
    assert [result["allowed"] for result in results] == [True, True]
    assert_equal(results[0]["weights"], model.state_dict(), tolerance=1e-4)
    assert results[1]["weights"] == {}
    assert [bool(result["num_state"]) for result in results] == [True, False]
    step(math.inf)
    for result in results:
        assert_equal(result["after"], dict(model.named_parameters()), tolerance=3e-4)
