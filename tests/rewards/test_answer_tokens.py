from __future__ import annotations

import pytest

from dapo_components.rewards.answer_tokens import Token, canonical, fold, tokenize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", "42"),
        ("\u22125", "-5"),  # minus sign
        ("\uff15", "5"),  # full-width digit
        ("\u200b12\xa0", "12 "),  # zero-width and no-break space
        ("2\u00bd", "2 1/2"),
        ("m\u00b2", "m^2"),
        ("x\u2081", "x_1"),
        ("\u03b1+\u03c3", "\\alpha +\\sigma "),
        ("\u0665", "\u0665"),  # digits of other scripts stay what they are
    ],
)
def test_fold(text, expected):
    assert fold(text) == expected


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (r"\dfrac{1}{2}", [r"\frac", "1", "2"]),
        (r"\frac12", [r"\frac", "1", "2"]),
        (r"\frac 59", [r"\frac", "5", "9"]),
        (r"\frac9{19}", [r"\frac", "9", "19"]),
        (r"\frac{72}5", [r"\frac", "72", "5"]),
        (r"\sqrt{3}", [r"\sqrt", "3"]),
        (r"\sqrt3", [r"\sqrt", "3"]),
        ("1,234", ["1234"]),
        ("1,234,567.50", ["1234567.50"]),
        (r"10,\!080", ["10080"]),
        (r"32,\! 349", ["32349"]),
        ("14 {, }916", ["14916"]),
        (r"1\,000", ["1000"]),
        ("1 000 000", ["1000000"]),
        ("1,23", ["1", ",", "23"]),  # no group of three
        ("1234,567", ["1234", ",", "567"]),
        ("5,99,100", ["5", ",", "99", ",", "100"]),  # the end of a list
        ("1,234, 5,678", ["1234", ",", "5678"]),
        ("(1,234)", ["(", "1", ",", "234", ")"]),  # a pair
        (r"\{1,234\}", [r"\{", "1", ",", "234", r"\}"]),
        (r"\frac{1,000}{3}", [r"\frac", "1000", "3"]),  # braces are no brackets
        ("7 300/4", ["7", "300", "/", "4"]),  # a mixed number
        (".5", [".5"]),
        ("1e-7", ["1e-7"]),
        ("2ex", ["2", "ex"]),
        ("2**10", ["2", "^", "10"]),
        (r"\left(\frac{1}{2}\right)", ["(", r"\frac", "1", "2", ")"]),
        ("x<=3", ["x", r"\le", "3"]),
        (r"2{x}", ["2", "x"]),
        ("{{7}}", ["7"]),
        ("x^{}", ["x", "^"]),
        ("{12}{3}", ["12", "3"]),
        ("x_{-1}", ["x", "_", "{", "-", "1", "}"]),
        (r"$\$5\%$", ["5", "%"]),
        ("5€", ["5"]),
        (r"a\\b", ["a", r"\\", "b"]),
        ("", []),
        ("$$", []),
    ],
)
def test_tokenize(text, values):
    assert [token.value for token in tokenize(text)] == values


def test_kinds_and_blanks():
    assert tokenize(r"5 \text{ m/s} x") == [
        Token("number", "5", False),
        Token("text", " m/s", True),
        Token("word", "x", True),
    ]


def test_a_text_command_keeps_its_content_whole():
    assert tokenize(r"\textbf{(D) \{1\}}") == [Token("text", r"(D) \{1\}")]
    assert [token.value for token in tokenize(r"\text{cut")] == [r"\text", "{", "cut"]


def test_blanks_keep_numbers_apart():
    assert canonical(tokenize("7 3/4")) != canonical(tokenize("73/4"))
    assert canonical(tokenize(r"\frac{1}{23}")) != canonical(tokenize(r"\frac{1}{2}3"))


def test_the_canonical_line_ignores_spelling_only():
    assert canonical(tokenize(r"3\sqrt{13}")) == canonical(tokenize(r"$3\sqrt 13$"))
    assert canonical(tokenize(r"\text{ no  solution }")) == "no solution"
