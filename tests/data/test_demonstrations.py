from __future__ import annotations

import random
import re

import pytest
import torch

from dapo_components.data.arithmetic import ADDITION_TEMPLATE, Addition, draw_additions
from dapo_components.data.character_tokenizer import VOCABULARY
from dapo_components.data.demonstrations import (
    IGNORED_LABEL,
    AdditionDemonstrations,
    DemonstrationMix,
    demonstrate,
    guess,
    work_in_steps,
)


class CharacterIds:
    """torchtune's tokenizer methods, in pure Python."""

    pad_id = 0

    def encode(self, text, add_bos=True, add_eos=True):
        assert not add_bos
        return [VOCABULARY[character] for character in text] + [VOCABULARY["<eos>"]] * add_eos


def ids(text):
    return CharacterIds().encode(text, add_bos=False, add_eos=False)


@pytest.mark.parametrize(
    ("problem", "slip_rate", "expected"),
    [
        (Addition(347, 286), 0.0, "7+6=13,4+8+1=13,3+2+1=06#633"),
        (Addition(123, 456), 0.0, "3+6=09,2+5+0=07,1+4+0=05#579"),
        (Addition(999, 999), 0.0, "9+9=18,9+9+1=19,9+9+1=19#1998"),
        (Addition(200, 300), 0.0, "0+0=00,0+0+0=00,2+3+0=05#500"),
        # Every carry forgotten, the last one too.
        (Addition(347, 286), 1.0, "7+6=13,4+8+0=12,3+2+0=05#523"),
        (Addition(999, 999), 1.0, "9+9=18,9+9+0=18,9+9+0=18#888"),
    ],
)
def test_steps(problem, slip_rate, expected):
    assert work_in_steps(problem, random.Random(0), slip_rate=slip_rate) == expected


def test_steps_are_right_for_every_problem_without_slips():
    for problem in draw_additions(500, split="train", num_digits=3, seed=0):
        response = work_in_steps(problem, random.Random(0), slip_rate=0.0)
        assert ADDITION_TEMPLATE.read_answer(response) == problem.answer


def test_a_slip_happens_at_the_rate_asked_for():
    rng = random.Random(0)
    # 5+5 has one carry, out of the only column: forgetting it is the only way to be wrong.
    wrong = sum(work_in_steps(Addition(5, 5), rng, slip_rate=0.2) != "5+5=10#10" for _ in range(4000))
    assert wrong / 4000 == pytest.approx(0.2, abs=0.019)  # three standard deviations


def test_a_ramble_goes_through_the_columns_again():
    response = work_in_steps(Addition(58, 61), random.Random(0), slip_rate=0.0, num_passes=3)
    assert response == "8+1=09,5+6+0=11,8+1=09,5+6+0=11,8+1=09,5+6+0=11#119"


def test_guesses_are_right_as_often_as_asked():
    problem = Addition(347, 286)
    rng = random.Random(0)
    guesses = [guess(problem, rng, accuracy=0.25) for _ in range(4000)]
    assert sum(text == "#633" for text in guesses) / 4000 == pytest.approx(0.25, abs=0.021)
    # A wrong guess is off by one of five amounts, up or down.
    assert {int(text[1:]) - 633 for text in guesses} == {0, *(s * d for s in (-1, 1) for d in (1, 2, 10, 20, 100))}


def test_styles_are_mixed_in_the_shares_asked_for():
    mix = DemonstrationMix(steps_share=0.3, ramble_share=0.2, max_passes=4)
    rng = random.Random(0)
    columns = [demonstrate(Addition(347, 286), mix, rng).count("=") for _ in range(4000)]
    shares = {count: columns.count(count) / 4000 for count in set(columns)}
    assert set(shares) == {0, 3, 6, 9, 12}  # no columns in a guess, three in each pass of at most four
    assert shares[0] == pytest.approx(0.5, abs=0.024)
    assert shares[3] == pytest.approx(0.3, abs=0.022)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps_share": -0.1}, r"steps_share must be in \[0, 1\], got -0.1"),
        ({"slip_rate": 1.1}, r"slip_rate must be in \[0, 1\], got 1.1"),
        ({"guess_accuracy": 2}, r"guess_accuracy must be in \[0, 1\], got 2"),
        ({"steps_share": 0.7, "ramble_share": 0.4}, r"steps_share \+ ramble_share must be <= 1, got 0.7 \+ 0.4"),
        ({"max_passes": 1}, "max_passes must be >= 2, got 1"),
    ],
)
def test_bad_mixes(arguments, message):
    with pytest.raises(ValueError, match=message):
        DemonstrationMix(**arguments)


STEPS_ONLY = {"steps_share": 1.0, "ramble_share": 0.0, "slip_rate": 0.0}


def test_a_row_masks_prompts_and_restarts_positions():
    # One-digit problems in steps, "a+b?" + "a+b=cc#c" + end: 4 + 9 tokens, one more with a two-digit answer.
    arguments = {"num_demonstrations": 2, "num_digits": 1, "mix": STEPS_ONLY, "seed": 0}
    rows = AdditionDemonstrations(CharacterIds(), row_length=30, **arguments)
    problems = draw_additions(2, split="train", num_digits=1, seed=0)
    prompts = [ids(f"{problem.question}?") for problem in problems]
    responses = [
        [*ids(f"{problem.question}={int(problem.answer):02d}#{problem.answer}"), VOCABULARY["<eos>"]]
        for problem in problems
    ]
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    padding = 30 - sum(lengths)
    assert len(rows) == 1
    assert padding > 0
    row = {name: values.tolist() for name, values in rows[0].items()}
    assert row["tokens"] == [*prompts[0], *responses[0], *prompts[1], *responses[1], *[0] * padding]
    ignored = [IGNORED_LABEL] * 4
    assert row["labels"] == [*ignored, *responses[0], *ignored, *responses[1], *[IGNORED_LABEL] * padding]
    assert row["input_pos"] == [*range(lengths[0]), *range(lengths[1]), *[0] * padding]
    assert row["seq_lens"] == [*lengths, padding]


def test_rows_hold_every_demonstration_once_and_only_training_problems():
    rows = AdditionDemonstrations(CharacterIds(), num_demonstrations=300, seed=1, row_length=128)
    texts = []
    characters = {index: character for character, index in VOCABULARY.items()}
    for index in range(len(rows)):
        row = rows[index]
        assert all(values.shape == (128,) for name, values in row.items() if name != "seq_lens")
        parts = row["tokens"].split(row["seq_lens"].tolist())
        texts += ["".join(characters[token] for token in part.tolist()) for part in parts]
    demonstrations = [re.fullmatch(r"(\d+)\+(\d+)\?.*#\d+<eos>", text) for text in texts if "<pad>" not in text]
    assert len(demonstrations) == 300
    assert all(demonstrations)
    found = [Addition(int(match[1]), int(match[2])) for match in demonstrations if match]
    assert len(set(found)) == 300
    assert not any(problem.is_held_out for problem in found)


def test_a_full_row_has_no_padding_entry():
    rows = AdditionDemonstrations(
        CharacterIds(), num_demonstrations=1, seed=0, num_digits=3, mix=STEPS_ONLY | {"slip_rate": 1.0}, row_length=37
    )
    # "abc+def?" + 6 + 1 + 8 + 1 + 8 for the columns, "#xyz" and the end: every carry is forgotten, so three digits.
    assert rows[0]["seq_lens"].tolist() == [37]


def test_seed_decides_everything():
    first, same, other = (
        torch.cat([row["tokens"] for row in AdditionDemonstrations(CharacterIds(), num_demonstrations=50, seed=seed)])
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_a_demonstration_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match=r"row_length must be >= 37, the length of a demonstration, got 36"):
        AdditionDemonstrations(
            CharacterIds(), num_demonstrations=1, seed=0, mix=STEPS_ONLY | {"slip_rate": 1.0}, row_length=36
        )


def test_packing_cannot_be_turned_off():
    with pytest.raises(ValueError, match="packed must be true"):
        AdditionDemonstrations(CharacterIds(), num_demonstrations=1, seed=0, packed=False)
