"""Index plans of micro-batches: what is fed, what is predicted, and who may look at whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_components.data.packing import PackedTokens, pack_micro_batch, plan_micro_batches


def fed_length(row, prompt_length, response_length):
    """Tokens of a row: the prompt once, and every response without its last token."""
    return prompt_length[row[0]] + sum(response_length[index] - 1 for index in row)


class TestPlan:
    def test_responses_of_a_group_share_a_row_and_short_rows_a_micro_batch(self):
        # Rows: (0, 1) feeds 3 + 1 + 3 = 7 tokens, (2,) feeds 2 + 0 = 2. Two rows padded to 7 are 14.
        assert plan_micro_batches([3, 3, 2], [2, 4, 1], [0, 0, 1], max_tokens=14) == [[(0, 1), (2,)]]

    def test_one_token_less_and_the_second_row_starts_a_micro_batch(self):
        assert plan_micro_batches([3, 3, 2], [2, 4, 1], [0, 0, 1], max_tokens=13) == [[(0, 1)], [(2,)]]

    def test_shared_rows_stop_at_max_shared_length(self):
        # 4 + 2 = 6 for one response, + 2 each: 6, 8, 10.
        lengths = ([4] * 3, [3] * 3, [0] * 3)
        assert plan_micro_batches(*lengths, max_tokens=100, max_shared_length=10) == [[(0, 1, 2)]]
        assert plan_micro_batches(*lengths, max_tokens=100, max_shared_length=9) == [[(0, 1), (2,)]]
        assert plan_micro_batches(*lengths, max_tokens=100, max_shared_length=7) == [[(0,), (1,), (2,)]]

    def test_a_row_is_never_shared_beyond_the_budget(self):
        # Together 3 + 4 * 7 = 31 tokens; alone 10, which fits 16.
        plan = plan_micro_batches([3] * 4, [8] * 4, [0] * 4, max_tokens=16, max_shared_length=512)
        assert plan == [[(0,)], [(1,)], [(2,)], [(3,)]]

    def test_longest_rows_come_first_so_that_padding_is_small(self):
        plan = plan_micro_batches([1] * 4, [2, 9, 3, 8], [0, 1, 2, 3], max_tokens=18)
        assert plan == [[(1,), (3,)], [(2,), (0,)]]

    def test_responses_without_a_token_are_left_out(self):
        assert plan_micro_batches([3, 3, 3], [0, 2, 0], [0, 0, 1], max_tokens=8) == [[(1,)]]
        assert plan_micro_batches([3, 3], [0, 0], [0, 0], max_tokens=8) == []
        assert plan_micro_batches([], [], [], max_tokens=8) == []

    def test_a_sequence_beyond_the_budget_is_refused_with_numbers(self):
        plan_micro_batches([5], [6], [0], max_tokens=10)
        with pytest.raises(ValueError, match=r"feeds 10 tokens to the model, more than max_tokens=9; raise the token"):
            plan_micro_batches([5], [6], [0], max_tokens=9)

    def test_an_empty_prompt_is_refused(self):
        with pytest.raises(ValueError, match="response 1 has an empty prompt"):
            plan_micro_batches([2, 0], [1, 1], [0, 1], max_tokens=8)

    def test_a_budget_without_room_is_refused(self):
        with pytest.raises(ValueError, match="max_tokens must be >= 1, got 0"):
            plan_micro_batches([1], [1], [0], max_tokens=0)

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_every_response_is_planned_once_within_the_budget(self, data):
        groups = data.draw(st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=5)), max_size=6))
        prompt_length = [prompt for prompt, responses in groups for _ in responses]
        response_length = [length for _, responses in groups for length in responses]
        group = [number for number, (_, responses) in enumerate(groups) for _ in responses]
        max_tokens = data.draw(st.integers(18, 60))
        max_shared = data.draw(st.integers(1, 60))
        plan = plan_micro_batches(
            prompt_length, response_length, group, max_tokens=max_tokens, max_shared_length=max_shared
        )
        planned = [index for rows in plan for row in rows for index in row]
        assert sorted(planned) == [index for index, length in enumerate(response_length) if length]
        for rows in plan:
            lengths = [fed_length(row, prompt_length, response_length) for row in rows]
            assert len(rows) * max(lengths) <= max_tokens
            for row, length in zip(rows, lengths, strict=True):
                assert len({group[index] for index in row}) == 1
                assert len(row) == 1 or length <= max_shared


PROMPTS = torch.tensor([[0, 5, 6], [0, 5, 6], [7, 8, 9]])
PROMPT_MASK = torch.tensor([[False, True, True], [False, True, True], [True, True, True]])
RESPONSES = torch.tensor([[11, 12, 13, 0], [21, 22, 0, 0], [31, 0, 0, 0]])
LENGTHS = [3, 2, 1]
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]


def pack(rows, mask=MASK, lengths=LENGTHS) -> PackedTokens:
    return pack_micro_batch(rows, PROMPTS, PROMPT_MASK, RESPONSES, lengths, mask, pad_id=99)


class TestPack:
    def test_layout_of_a_shared_and_a_single_row(self):
        packed = pack([(0, 1), (2,)])
        assert packed.tokens.tolist() == [[5, 6, 11, 12, 21], [7, 8, 9, 99, 99]]
        assert packed.positions.tolist() == [[0, 1, 2, 3, 2], [0, 1, 2, 0, 0]]
        # The last prompt token predicts both first response tokens; flat positions of the second row start at 5.
        assert packed.source.tolist() == [1, 2, 3, 1, 4, 7]
        assert packed.target_tokens.tolist() == [11, 12, 13, 21, 22, 31]
        assert packed.responses.tolist() == [0, 1, 2]
        assert packed.target.tolist() == [0, 1, 2, 4, 5, 8]

    def test_attention_of_a_shared_row(self):
        packed = pack([(0, 1), (2,)])
        assert packed.attention_mask is not None
        shared = [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 0, 0, 1],  # the second response sees the prompt and itself, not the first response
        ]
        # Padding sees something, so that no softmax is empty.
        single = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
        assert packed.attention_mask.int().tolist() == [shared, single]

    def test_rows_of_one_response_need_no_mask(self):
        assert pack([(0,), (2,)]).attention_mask is None

    def test_only_wanted_positions_are_predicted(self):
        wanted = MASK.clone()
        wanted[0, 1] = wanted[2, 0] = False
        packed = pack([(0, 1), (2,)], wanted)
        assert packed.source.tolist() == [1, 3, 1, 4]
        assert packed.target_tokens.tolist() == [11, 13, 21, 22]
        assert packed.target.tolist() == [0, 2, 4, 5]

    def test_tokens_after_the_needed_length_are_not_fed(self):
        wanted = MASK.clone()
        wanted[0, 1:] = False
        packed = pack([(0,), (1,)], wanted, [1, 2, 1])
        assert packed.tokens.tolist() == [[5, 6, 99], [5, 6, 21]]
        assert packed.target_tokens.tolist() == [11, 21, 22]

    def test_scatter_puts_every_prediction_in_its_place_and_passes_gradients(self):
        packed = pack([(2,), (0, 1)])
        values = torch.arange(1.0, 7.0, requires_grad=True)
        scattered = packed.scatter(values, 4)
        assert packed.responses.tolist() == [2, 0, 1]
        assert scattered.tolist() == [[1, 0, 0, 0], [2, 3, 4, 0], [5, 6, 0, 0]]
        scattered.square().sum().backward()
        assert values.grad is not None
        assert values.grad.tolist() == [2, 4, 6, 8, 10, 12]

    def test_to_keeps_every_field(self):
        for packed in (pack([(0, 1)]), pack([(0,)])):
            moved = packed.to("meta")
            for name, value in vars(packed).items():
                found = getattr(moved, name)
                if value is None:
                    assert found is None
                else:
                    assert (found.device.type, found.shape, found.dtype) == ("meta", value.shape, value.dtype)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4), st.data())
    def test_every_wanted_token_is_predicted_once_from_the_token_before_it(self, groups, data):
        lengths = [length for group in groups for length in group]
        group = [number for number, members in enumerate(groups) for _ in members]
        prompt_length = [1 + number for number in group]
        num_responses, width = len(lengths), max(lengths)
        # Ids name their origin: prompt tokens 1, 2, ... of a group are 1000 * (group + 1) + position.
        prompts = torch.zeros(num_responses, max(prompt_length), dtype=torch.long)
        responses = torch.full((num_responses, width), -7)
        for index, key in enumerate(group):
            prompts[index, -prompt_length[index] :] = torch.arange(prompt_length[index]) + 1000 * (key + 1)
            responses[index, : lengths[index]] = torch.arange(lengths[index]) + 100_000 * (index + 1)
        bits = st.lists(st.booleans(), min_size=width, max_size=width)
        drawn = data.draw(st.lists(bits, min_size=num_responses, max_size=num_responses))
        wanted = torch.tensor(drawn) & (torch.arange(width) < torch.tensor(lengths)[:, None])
        plan = plan_micro_batches(prompt_length, lengths, group, max_tokens=data.draw(st.integers(9, 40)))
        found = []
        for rows in plan:
            packed = pack_micro_batch(rows, prompts, prompts > 0, responses, lengths, wanted)
            before, after = packed.tokens.flatten()[packed.source], packed.target_tokens
            place = packed.responses[packed.target // width] * width + packed.target % width
            found += list(zip(place.tolist(), before.tolist(), after.tolist(), strict=True))
        expected = []
        for index in range(num_responses):
            sequence = [int(prompts[index, -1]), *responses[index].tolist()]
            expected += [
                (index * width + t, sequence[t], sequence[t + 1]) for t in range(width) if bool(wanted[index, t])
            ]
        assert sorted(found) == expected
