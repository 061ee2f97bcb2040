from __future__ import annotations

import pytest

from dapo_components.data.arithmetic import ADDITION_TEMPLATE, Addition, ArithmeticProblems, draw_additions
from dapo_components.data.loader import PromptLoader


def pairs(problems):
    return {tuple(sorted((problem.left, problem.right))) for problem in problems}


def test_question_and_answer():
    assert (Addition(904, 97).question, Addition(904, 97).answer) == ("904+97", "1001")


def test_held_out_does_not_depend_on_the_order_of_the_summands():
    numbers = range(100, 140)
    assert all(Addition(a, b).is_held_out == Addition(b, a).is_held_out for a in numbers for b in numbers)
    # Two fixed points: the split must never change between versions, or held-out problems leak into training.
    assert Addition(988, 627).is_held_out
    assert not Addition(347, 286).is_held_out


def test_one_pair_in_ten_is_held_out():
    count = sum(Addition(left, right).is_held_out for left in range(10, 100) for right in range(left, 100))
    assert count / 4095 == pytest.approx(0.1, abs=0.014)  # three standard deviations of a fair draw


def test_splits_share_no_pair_whatever_the_seeds():
    train = draw_additions(5000, split="train", num_digits=2, seed=3)
    test = draw_additions(600, split="test", num_digits=2, seed=4)
    assert pairs(train).isdisjoint(pairs(test))


def test_splits_cover_every_problem_once():
    test = draw_additions(2, split="test", num_digits=1, seed=0)
    train = draw_additions(79, split="train", num_digits=1, seed=0)
    assert {(p.left, p.right) for p in train + test} == {(a, b) for a in range(1, 10) for b in range(1, 10)}
    assert len({(p.left, p.right) for p in train}) == 79


def test_more_problems_than_the_split_has_is_an_error():
    with pytest.raises(ValueError, match=r"num_problems must be <= 79, .*got 80; raise num_digits"):
        draw_additions(80, split="train", num_digits=1, seed=0)


def test_numbers_have_the_digits_asked_for():
    numbers = [n for p in draw_additions(2000, split="train", num_digits=3, seed=0) for n in (p.left, p.right)]
    assert min(numbers) in range(100, 105)
    assert max(numbers) in range(995, 1000)


def test_seed_decides_the_problems():
    draws = [draw_additions(20, split="train", num_digits=3, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert pairs(draws[0]).isdisjoint(pairs(draws[2]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "split must be 'train' or 'test', got 'dev'"),
        ({"num_digits": 0}, r"num_digits must be in \[1, 4\], got 0"),
        ({"num_digits": 5}, r"num_digits must be in \[1, 4\], got 5"),
        ({"num_problems": 0}, "num_problems must be >= 1, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_additions(**{"num_problems": 1, "split": "train", "num_digits": 3, "seed": 0} | arguments)


def test_template_asks_and_reads_the_number_after_the_last_mark():
    assert ADDITION_TEMPLATE.request("347+286") == "347+286?"
    assert ADDITION_TEMPLATE.read_answer("7+6=13#13,4+8+1=13,3+2+1=6#633") == "633"
    assert ADDITION_TEMPLATE.read_answer("7+6=13") is None
    assert ADDITION_TEMPLATE.read_answer("#633", truncated=True) is None  # the cut may have taken a digit


def test_problems_are_prompts_with_their_answer(tokenizer):
    dataset = ArithmeticProblems(tokenizer, split="test", num_problems=3, seed=0)
    assert len(dataset) == 3
    assert [prompt.text for prompt in dataset] == ["988+627?", "646+419?", "179+604?"]
    assert dataset[1].prompt_id == 1
    assert dataset[1].columns == {"problem": "646+419", "answer": "1065"}
    assert tokenizer.decode(dataset[1].tokens) == "6 4 6 + 4 1 9 ?"
    assert dataset.num_dropped == {}


def test_fingerprint_follows_the_problems(tokenizer):
    def fingerprint(num_problems=3, seed=0, **split):
        return ArithmeticProblems(tokenizer, num_problems=num_problems, seed=seed, **split).fingerprint

    assert fingerprint() == fingerprint(split="train")
    assert len({fingerprint(), fingerprint(seed=1), fingerprint(split="test"), fingerprint(num_problems=4)}) == 4


def test_a_loader_takes_it(tokenizer):
    dataset = ArithmeticProblems(tokenizer, num_problems=4, seed=0)
    loader = PromptLoader(dataset, seed=0)
    assert sorted(prompt.prompt_id for prompt in loader.take(4)) == [0, 1, 2, 3]


def test_a_prompt_over_the_budget_is_an_error(tokenizer):
    assert len(ArithmeticProblems(tokenizer, num_problems=1, seed=0, max_prompt_length=8)) == 1
    with pytest.raises(ValueError, match=r"max_prompt_length must be >= 8 for '\d+\+\d+\?', got 7"):
        ArithmeticProblems(tokenizer, num_problems=1, seed=0, max_prompt_length=7)


def test_indices_outside_the_data_are_refused(tokenizer):
    dataset = ArithmeticProblems(tokenizer, num_problems=2, seed=0)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=rf"prompt_id must be in \[0, 2\), got {index}"):
            dataset[index]
