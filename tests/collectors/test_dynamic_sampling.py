"""Exact counts of dynamic sampling, worked out by hand, and that no group is ever lost or used twice."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_components.collectors import DynamicSamplingCollector, DynamicSamplingExhausted
from dapo_components.filters import NonZeroStdFilter
from dapo_components.rewards import RewardSet
from dapo_components.training.metrics import MetricSums
from tests.collectors.scripted import (
    SeededGenerator,
    collector,
    first_token_is_one,
    length_bonus,
    prompt_ids,
    waiting_prompts,
)


def counts(source: DynamicSamplingCollector, *names: str) -> tuple[int, ...]:
    return tuple(source.counts[name] for name in names)


def assert_same(one: Any, other: Any) -> None:
    keys = sorted(map(str, one.keys(include_nested=True, leaves_only=True)))
    assert keys == sorted(map(str, other.keys(include_nested=True, leaves_only=True)))
    for key in one.keys(include_nested=True, leaves_only=True):
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)


class TestRefill:
    def test_missing_groups_are_launched_until_the_batch_is_full(self):
        source = collector("HIEIHHII", prompts_per_step=3, oversampling=1.0)
        # Rounds: 3 launched, 1 kept; acceptance (1 + 1/3) / 2 = 2/3, so 2 missing make 3; 1 kept; acceptance 1/2,
        # so 1 missing makes 2; both kept, one is surplus.
        assert prompt_ids(source.collect()) == [1, 3, 6]
        assert counts(source, "gen_batches", "launched", "filtered", "used", "waiting") == (3, 8, 4, 3, 1)
        assert waiting_prompts(source) == [7]
        assert counts(source, "filtered/accuracy all 0", "filtered/accuracy all 1") == (3, 1)

    def test_surplus_waits_and_is_used_next_in_dispatch_order(self):
        source = collector("I" * 12, prompts_per_step=4, oversampling=1.5)
        assert prompt_ids(source.collect()) == [0, 1, 2, 3]
        assert counts(source, "launched", "carried_in", "waiting") == (6, 0, 2)
        # Acceptance (2/3 + 1) / 2 = 5/6: 2 missing make 2.4, that is 3.
        assert prompt_ids(source.collect()) == [4, 5, 6, 7]
        assert counts(source, "launched", "carried_in", "waiting") == (3, 2, 1)
        # Acceptance 11/12: 3 missing make 3.3, that is 4, one of them from the next epoch.
        assert prompt_ids(source.collect()) == [8, 9, 10, 11]
        assert counts(source, "launched", "carried_in", "waiting") == (4, 1, 1)
        assert waiting_prompts(source) == [0]

    def test_a_full_waiting_line_needs_no_generation(self):
        source = collector("I" * 8, prompts_per_step=2, oversampling=2.0)
        source.collect()
        assert prompt_ids(source.collect()) == [2, 3]
        assert counts(source, "gen_batches", "launched", "used") == (0, 0, 2)

    def test_oversampling_is_bounded(self):
        source = collector("H" * 8 + "I" * 4, prompts_per_step=2, oversampling=2.0, max_oversampling=2.0)
        assert prompt_ids(source.collect()) == [8, 9]
        assert counts(source, "gen_batches", "launched") == (3, 12)

    def test_rounding_errors_launch_nothing(self):
        source = collector("I" * 11, prompts_per_step=10, oversampling=1.1)
        source.collect()
        assert source.counts["launched"] == 11  # 10 * 1.1 is 11.000000000000002

    def test_without_a_limit_it_goes_on(self):
        options: dict[str, Any] = {"prompts_per_step": 1, "oversampling": 1.0, "max_oversampling": 1.0}
        source = collector("H" * 14 + "I", max_gen_batches=0, **options)
        assert prompt_ids(source.collect()) == [14]
        assert source.counts["gen_batches"] == 15
        with pytest.raises(DynamicSamplingExhausted):
            collector("H" * 14 + "I", **options).collect()  # 10 rounds by default

    def test_without_a_filter_every_group_is_used(self):
        source = collector("HEIHE", group_filter=None, prompts_per_step=2, oversampling=3.0)
        assert prompt_ids(source.collect()) == [0, 1]
        assert counts(source, "launched", "filtered", "waiting") == (2, 0, 0)
        assert prompt_ids(source.collect()) == [2, 3]

    def test_group_ids_are_unique_over_ranks(self):
        ids = []
        for rank in range(2):
            source = collector("I" * 8, prompts_per_step=2, oversampling=1.0, rank=rank, world_size=2)
            ids.append([source.collect()["group_id"][:, 0].tolist() for _ in range(2)])
        assert ids == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


class TestStaleness:
    @pytest.mark.parametrize(
        ("max_staleness", "second", "third", "stale"),
        # One of four is used; three wait. Launches later: 1 missing / acceptance 0.625 makes 2.
        [(0, [4], [6], [3, 1]), (1, [1], [4], [0, 2]), (2, [1], [2], [0, 0])],
    )
    def test_groups_that_waited_too_long_are_dropped_and_counted(self, max_staleness, second, third, stale):
        source = collector("I" * 12, prompts_per_step=1, oversampling=4.0, max_staleness=max_staleness)
        assert prompt_ids(source.collect()) == [0]
        assert waiting_prompts(source) == [1, 2, 3]
        found = []
        for expected in (second, third):
            assert prompt_ids(source.collect()) == expected
            found.append(source.counts["stale"])
        assert found == stale


class TestExhaustion:
    # Rounds of two and, at acceptance 1/2, four: prompt 2 is the only informative one.
    PATTERN = "HHIEHHIII"

    def source(self, on_exhausted: str, pattern: str = PATTERN) -> DynamicSamplingCollector:
        return collector(pattern, prompts_per_step=2, oversampling=1.0, max_gen_batches=2, on_exhausted=on_exhausted)

    def test_raise_states_numbers_and_remedies(self):
        source = self.source("raise")
        with pytest.raises(DynamicSamplingExhausted) as caught:
            source.collect()
        text = str(caught.value)
        assert text == (
            "1 of 2 groups after 2 generation batches (6 groups launched, dropped: {'accuracy all 0': 4, 'accuracy all "
            "1': 1}); raise max_gen_batches, use prompts nearer to the policy's ability, or set on_exhausted to "
            "smaller_batch or keep_uninformative"
        )
        assert counts(source, "launched", "carried_in", "used", "waiting", "filtered") == (6, 0, 0, 1, 5)

    def test_accepted_groups_survive_a_raise(self):
        source = self.source("raise")
        with pytest.raises(DynamicSamplingExhausted):
            source.collect()
        assert waiting_prompts(source) == [2]
        # Acceptance (1/2 + 1/4) / 2 = 3/8: 1 missing makes 2.7, that is 3.
        assert prompt_ids(source.collect()) == [2, 6]
        assert counts(source, "launched", "carried_in", "used", "waiting") == (3, 1, 2, 2)

    def test_smaller_batch_goes_on_with_what_there_is(self):
        source = self.source("smaller_batch")
        assert prompt_ids(source.collect()) == [2]
        assert counts(source, "used", "waiting", "filtered", "short_batch") == (1, 0, 5, 1)

    def test_smaller_batch_of_nothing_raises(self):
        with pytest.raises(DynamicSamplingExhausted, match="0 of 2 groups after 2 generation batches"):
            self.source("smaller_batch", "HHHHHHH").collect()

    def test_keep_uninformative_fills_up_in_dispatch_order(self):
        source = self.source("keep_uninformative")
        assert prompt_ids(source.collect()) == [2, 0]
        assert counts(source, "used", "waiting", "filtered", "kept_uninformative") == (2, 0, 4, 1)
        source = self.source("keep_uninformative", "EHEHEHE")
        assert prompt_ids(source.collect()) == [0, 1]


class TestFilter:
    def test_it_reads_correctness_not_the_reward(self):
        """All responses of an H group are wrong, but of different length and so of different reward."""
        reward = RewardSet({"right": first_token_is_one, "length": length_bonus}, accuracy_key="right")
        source = collector("HIHI", reward=reward, prompts_per_step=2, oversampling=2.0)
        batch = source.collect()
        assert prompt_ids(batch) == [1, 3]
        assert batch["reward"].tolist() == [[1.5, 1.0]] * 2
        shaped = NonZeroStdFilter(key="reward")
        source = collector("HIHI", group_filter=shaped, reward=reward, prompts_per_step=2, oversampling=1.0)
        assert prompt_ids(source.collect()) == [0, 1]

    def test_rollouts_are_reported_with_the_decision(self):
        rows: list[list[dict[str, Any]]] = []
        source = collector("HIE", prompts_per_step=1, oversampling=3.0, on_rollouts=rows.append)
        source.collect()
        assert [[row["sample_id"] for row in group] for group in rows] == [[0, 1]] * 3
        assert [group[0]["prompt_id"] for group in rows] == [0, 1, 2]
        assert [group[0]["kept"] for group in rows] == [False, True, False]
        assert [bool(group[1]["filter_reason"]) for group in rows] == [True, False, True]


def test_report_measures_all_responses_before_filtering():
    source = collector("HIEIHHII", prompts_per_step=3, oversampling=1.0)
    source.collect()
    metrics = MetricSums()
    source.report(metrics)
    assert metrics.reduce() == pytest.approx(
        {
            "sampling/gen_batches": 3.0,
            "sampling/launched": 8.0,
            "sampling/used": 3.0,
            "sampling/carried_in": 0.0,
            "sampling/waiting": 1.0,
            "sampling/filtered": 4.0,
            "sampling/stale": 0.0,
            "sampling/kept_uninformative": 0.0,
            "sampling/short_batch": 0.0,
            "rewards/right/ok": 16.0,
            "sampling/accuracy": 6 / 16,  # four mixed groups and one easy one: 4 + 2 of 16 right
            "sampling/kept_share": 0.5,
        }
    )


class TestResume:
    def source(self, num_prompts: int = 10) -> DynamicSamplingCollector:
        return collector("I" * num_prompts, generator=SeededGenerator(), prompts_per_step=3, oversampling=1.5)

    @pytest.mark.parametrize("stopped_after", range(4))
    def test_the_next_batches_are_those_of_a_run_that_never_stopped(self, stopped_after):
        source = self.source()
        for _ in range(stopped_after):
            source.collect()
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        resumed = self.source()
        resumed.load_state_dict(torch.load(file, weights_only=True))
        for _ in range(4):
            assert_same(resumed.collect(), source.collect())
            assert resumed.counts == source.counts

    def test_what_is_resumed_here_has_waiting_groups_and_rejected_ones(self):
        source = self.source()
        totals = [0, 0, 0]
        for _ in range(4):
            source.collect()
            totals = [a + b for a, b in zip(totals, counts(source, "waiting", "filtered", "carried_in"), strict=True)]
        assert min(totals) >= 2

    def test_a_state_is_not_changed_by_going_on(self):
        source = self.source()
        source.collect()
        state = source.state_dict()
        expected = source.collect()
        source.collect()
        resumed = self.source()
        resumed.load_state_dict(state)
        assert_same(resumed.collect(), expected)

    def test_accepted_groups_survive_a_stop_after_exhaustion(self):
        source = TestExhaustion().source("raise")
        with pytest.raises(DynamicSamplingExhausted):
            source.collect()
        resumed = TestExhaustion().source("raise")
        resumed.load_state_dict(source.state_dict())
        assert prompt_ids(resumed.collect()) == [2, 6]

    def test_a_batch_put_back_comes_first_again(self):
        source, reference = self.source(), self.source()
        source.collect()
        reference.collect()
        source.put_back(source.collect())
        expected = reference.collect()
        resumed = self.source()
        resumed.load_state_dict(source.state_dict())
        for each in (source, resumed):
            assert_same(each.collect(), expected)
            assert counts(each, "launched", "stale", "used") == (0, 0, 3)
        assert_same(source.collect(), reference.collect())


@settings(max_examples=80, deadline=None)
@given(
    pattern=st.text("IEH", min_size=1, max_size=8),
    prompts_per_step=st.integers(1, 4),
    oversampling=st.sampled_from([1.0, 1.5, 3.0]),
    max_gen_batches=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    on_exhausted=st.sampled_from(["raise", "smaller_batch", "keep_uninformative"]),
)
def test_counters_balance_and_no_group_is_lost_or_doubled(pattern, on_exhausted, **options):
    finished: dict[int, bool] = {}
    source = collector(
        pattern,
        on_exhausted=on_exhausted,
        on_rollouts=lambda rows: finished.update({rows[0]["group_id"]: rows[0]["kept"]}),
        **options,
    )
    used: list[int] = []
    totals = dict.fromkeys(("launched", "stale", "filtered", "kept_uninformative"), 0)
    before = 0
    for _ in range(4):
        try:
            taken = source.collect()["group_id"][:, 0].tolist()
        except DynamicSamplingExhausted:
            assert on_exhausted != "keep_uninformative"
            taken = []
        now = source.counts
        assert now["launched"] + now["carried_in"] == now["used"] + now["waiting"] + now["filtered"]
        assert now["carried_in"] + now["stale"] == before
        assert (now["used"], now["waiting"]) == (len(taken), len(source.state_dict()["waiting"]))
        reasons = sum(count for name, count in now.items() if name.startswith("filtered/"))
        assert reasons == now["filtered"] + now["kept_uninformative"]
        informative = [group for group in taken if finished[group]]
        assert informative == sorted(informative)  # dispatch order
        assert len(taken) - len(informative) == now["kept_uninformative"]
        used += taken
        before = now["waiting"]
        totals = {name: total + now[name] for name, total in totals.items()}
    assert len(set(used)) == len(used)
    assert sorted(finished) == list(range(totals["launched"]))
    assert totals["launched"] == len(used) + before + totals["stale"] + totals["filtered"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts_per_step": 0}, "prompts_per_step must be >= 1, got 0"),
        ({"oversampling": 0.9}, r"oversampling must be in \[1, max_oversampling=4.0\], got 0.9"),
        (
            {"oversampling": 3.0, "max_oversampling": 2.0},
            r"must be in \[1, max_oversampling=2.0\], got 3.0",
        ),
        ({"max_gen_batches": -1}, "max_gen_batches=-1 and max_staleness=1 must be >= 0"),
        ({"max_staleness": -1}, "max_gen_batches=10 and max_staleness=-1 must be >= 0"),
        ({"on_exhausted": "loop"}, "on_exhausted must be 'raise', 'smaller_batch' or 'keep_uninformative', got 'loop'"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        collector("I", **{"prompts_per_step": 1, **options})
