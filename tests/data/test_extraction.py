from __future__ import annotations

import time

import pytest

from dapo_components.data.extraction import (
    after_last,
    drop_thinking,
    last_answer_line,
    last_boxed,
    last_hash_line,
    whole_response,
)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"\boxed{9}", "9"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),  # escaped braces close nothing
        (r"\boxed{\}5}", r"\}5"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5, then \boxed{6}", "6"),
        (r"a set {1, 2 and \boxed{3}", "3"),  # an open brace before the box
        (r"} and \boxed{3}", "3"),
        (r"\boxed{4}, in the end \boxed{12", "4"),  # the cut box is no answer
        (r"\boxed{12", None),
        (r"\boxed", None),
        (r"\boxed{}", ""),
        (r"<think>\boxed{12}</think>\boxed{15}", "15"),
        (r"<think>\boxed{12}</think> 15", None),
        (r"\boxed{1} <think>\boxed{2}", "1"),
        ("15", None),
        ("", None),
    ],
)
def test_last_boxed(response, expected):
    assert last_boxed(response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Answer: 42", "42"),
        ("answer : 42", "42"),
        ("**Answer:** 42", "42"),
        ("**Answer**: **42**", "42"),
        ("Answer: 41\nLet me check.\nAnswer: 42\nDone.", "42"),
        ("Answer:\n42", "42"),
        ("Answer\uff1a42", "42"),
        ("Answer:", None),
        ("Answer: **", None),
        ("The answer is 42", None),
        ("<think>Answer: 3</think>", None),
    ],
)
def test_last_answer_line(response, expected):
    assert last_answer_line(response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [("#### 1\n#### -3\n", "-3"), ("####3", "3"), ("####", None), ("### 3", None), ("#### \n5", None)],
)
def test_last_hash_line(response, expected):
    assert last_hash_line(response) == expected


def test_whole_response_of_blanks_is_no_answer():
    assert whole_response(" 4 2\n") == "4 2"
    assert whole_response(" \n\t") is None


def test_after_last_takes_the_rest_of_the_line():
    assert after_last("=>")("1 => 2 => 3\n=") == "3"
    assert after_last("=>")("3") is None
    with pytest.raises(ValueError, match="mark must not be empty"):
        after_last("")


def test_drop_thinking_keeps_what_follows_the_last_end():
    assert drop_thinking("<think>a</think>b<think>c</think>d") == "d"
    assert drop_thinking("a</think>b") == "b"  # the prompt may open the thinking part
    assert drop_thinking("a<think>b") == "a"


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 40_000,
        "{" * 200_000,
        r"\boxed " * 40_000,
        "Answer:" * 40_000 + "\n" * 100_000,
        "answer" + " " * 300_000,
        "<think>" * 40_000,
        "####" * 60_000,
        "\\" * 200_001,
    ],
)
def test_time_is_linear(text):
    """Quadratic work on these would take minutes."""
    start = time.process_time()
    for extract in (last_boxed, last_answer_line, last_hash_line, whole_response):
        extract(text)
    assert time.process_time() - start < 5.0
