from __future__ import annotations

from fractions import Fraction

import pytest

from dapo_components.rewards.answer_numbers import Number
from dapo_components.rewards.answer_tokens import tokenize
from dapo_components.rewards.answer_values import (
    Collection,
    Named,
    Opaque,
    Words,
    equal_answers,
    is_understood,
    parse_answer,
)

ONE, TWO = Number(Fraction(1)), Number(Fraction(2))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1", ONE),
        (r"\text{1}", ONE),
        (r"\text{\text{1}}", ONE),
        ("(1)", ONE),
        ("1, 2", Collection((ONE, TWO))),
        ("1;2", Collection((ONE, TWO))),
        ("1 and 2", Collection((ONE, TWO))),
        (r"1, \text{ and } 2", Collection((ONE, TWO))),
        ("1 or 2", Collection((ONE, TWO))),
        (r"\{1,2\}", Collection((ONE, TWO))),
        (r"\{1\}", Collection((ONE,))),
        ("(1,2)", Collection((ONE, TWO), "()")),
        ("[1,2)", Collection((ONE, TWO), "[)")),
        (r"\langle 1,2\rangle", Collection((ONE, TWO), r"\langle\rangle")),
        (r"\pm 1", Collection((ONE, Number(Fraction(-1))))),
        ("x = 1", Named("x", ONE)),
        ("x = 0+1 = 1", Named("x", ONE)),
        ("x = 2/2 = 1", Named("x", ONE)),
        ("x = 2 = 1", Opaque("x = 2 = 1")),  # two answers
        (r"a_{37} = 1", Named("a _ 37", ONE)),
        (r"x \approx 1", Named("x", ONE)),
        ("f(y) = y", Named("f ( y )", Opaque("y"))),
        ("|AB| = 1", Named("| AB |", ONE)),
        (r"\frac{NO}{BO} = 1", Named(r"\frac NO BO", ONE)),
        ("area = 1", Named("area", ONE)),
        ("(p,q) = (1,2)", Named("( p , q )", Collection((ONE, TWO), "()"))),
        (r"\text{Evelyn}", Words("evelyn")),
        ("No Solution", Words("no solution")),
        (r"\text{(C)}", Opaque("C")),
        ("x", Opaque("x")),
        ("x+z = 1", Opaque("x + z = 1")),
        ("2x = 1", Opaque("2 x = 1")),
        ("xy = 1", Opaque("xy = 1")),
        ("0 = 0", Opaque("0 = 0")),
        (r"\sin x = 1", Opaque(r"\sin x = 1")),
        ("=", Opaque("=")),
        (r"1 \pm 2", Opaque(r"1 \pm 2")),
        ("(1,2", Opaque("( 1 , 2")),
        ("(1)(2)", Opaque("( 1 ) ( 2 )")),
        ("+x", Opaque("x")),
    ],
)
def test_parse_answer(text, answer):
    assert parse_answer(tokenize(text)) == answer


def test_a_union_is_unordered_and_no_list():
    union = parse_answer(tokenize(r"(1,2) \cup (2,3)"))
    assert isinstance(union, Collection)
    assert union.brackets == "union"
    assert equal_answers(union, parse_answer(tokenize(r"(2,3) \cup (1,2)")))
    assert not equal_answers(union, parse_answer(tokenize("(1,2), (2,3)")))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("3, 5, 7", "7, 5, 3", True),
        ("3, 5, 7", "3, 5", False),
        ("1, 1, 2", "1, 2, 2", False),  # a multiset
        ("1, -2", "1, -3", False),
        (r"\{1,2\}", "2, 1", True),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "[1,2]", False),
        ("(1,2)", "1,2", False),
        ("(5, 8), (8, 5)", "(8,5), (5,8)", True),
        ("(0;0;0),(0;-2;0)", "(0,0,0), (0,-2,0)", True),
        (r"\frac{1}{2}, 3", "3, 0.5", True),
        (r"\pm 5", "5", False),
        (r"\pm 5", "-5, 5", True),
        ("5", "5, 6", False),
        ("1234", "(1,234)", False),
        ("x = 5", "5", True),
        ("x = 5", "y = 5", False),
        ("a_3 = 2, a_{37} = 19", "a_{37} = 19, a_3 = 2", True),
        ("a_3 = 2, a_{37} = 19", "a_3 = 19, a_{37} = 2", False),
        (r"\text{Yes}", "yes", True),
        ("3R^2", "3r^2", False),
        ("C", "(C)", True),
        (r"(2,\infty)", r"(2,+\infty)", True),
        ("True", "1", False),
        ("none", "0", False),
        (r"\text{A or B or C}", "A", False),
    ],
)
def test_equal_answers_both_ways_round(first, second, expected):
    a, b = parse_answer(tokenize(first)), parse_answer(tokenize(second))
    assert equal_answers(a, b) is expected
    assert equal_answers(b, a) is expected
    assert equal_answers(a, a)


def test_long_lists_are_compared_without_matching_pairs():
    first, second = (",".join(map(str, numbers)) for numbers in (range(100), reversed(range(100))))
    third = ",".join(map(str, range(1, 101)))
    a, b, c = (parse_answer(tokenize(text)) for text in (first, second, third))
    assert equal_answers(a, b)
    assert not equal_answers(a, c)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", True),
        ("no", True),
        ("(1, x)", True),
        ("x", True),
        ("e", False),
        ("i", False),
        ("x = 2y", False),
        ("1, 2y", False),
    ],
)
def test_is_understood(text, expected):
    assert is_understood(parse_answer(tokenize(text))) is expected
