from __future__ import annotations

from fractions import Fraction

import pytest

from dapo_components.rewards.answer_numbers import Number, equal_numbers, parse_number
from dapo_components.rewards.answer_tokens import tokenize


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", "5"),
        ("-12", "-12"),
        ("+3", "3"),
        ("033", "33"),
        ("0.50", "1/2"),
        (".4", "2/5"),
        ("7,425,000", "7425000"),
        ("-36,104", "-36104"),
        (r"\$18.90", "189/10"),
        ("-$5", "-5"),
        ("10/9", "10/9"),
        (r"-\frac{35}{9}", "-35/9"),
        (r"\frac{2}{-3}", "-2/3"),
        ("2/(-3)", "-2/3"),
        ("(5)", "5"),
        (r"{1 \over 2}", "1/2"),
        (r"\frac{1}{\frac{2}{3}}", "3/2"),
        (r"\frac{1.5}{2}", "3/4"),
        (r"1\frac{4}{5}", "9/5"),
        ("2 1/4", "9/4"),
        (r"-1\frac{1}{2}", "-3/2"),  # the sign covers both parts
        ("2\u00bd", "5/2"),
        (r"1.5 \times 10^{3}", "1500"),
        (r"3 \cdot 10^{-5}", "3/100000"),
        ("1e-7", "1/10000000"),
        ("10^{-7}", "1/10000000"),
        ("10^6", "1000000"),
        ("5 million", "5000000"),
        (r"2\text{ thousand}", "2000"),
        (r"15\mbox{ cm}^2", "15"),
        ("15 cm^2", "15"),
        ("1,000.99m\u00b2", "100099/100"),
        (r"9.8\ \mathrm{m/s^2}", "49/5"),
        ("60 km/h", None),  # h is no known short unit
        ("60 km/hr", "60"),
        ("10 students", "10"),
        ("12 square inches", "12"),
        (r"120^\circ", "120"),
        (r"\frac{45}{2}^\circ", "45/2"),
        ("72 degrees", "72"),
    ],
)
def test_what_is_a_number(text, value):
    number = parse_number(tokenize(text))
    assert (None if number is None else number.value) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    "text",
    [
        "2+3", "2*3", "(9+1)", "2^10", "5!", "7,", "1,2", "(1,2)", "1..2", "1.2.3", "--5", "5 or 6", "5 and", "not 5",
        "2x", "2ab", "3 pi", r"2\pi", r"\sqrt{4}", "x", "", r"\frac{1}{0}", "1/0", r"\frac{1}{x}",
        r"\frac{7}{\text{it}}",
        r"\text{5}", "52_8", "7:32", "1e999999999", r"10^{10^{10}}", r"10^{401}", "\u0665", "5 squared", "5 factorial",
        r"5\text{ or }6", r"2\text{ hours and } 30\text{ minutes}", r"5\text{ per } 2", "5^2", "5^\\circ 30",
        r"1\frac{1}{x}",
        "(" * 200 + "1" + ")" * 200, r"\frac{1}{" * 50 + "1" + "}" * 50,
    ],
)  # fmt: skip
def test_what_is_no_number(text):
    assert parse_number(tokenize(text)) is None


@pytest.mark.parametrize(
    ("text", "digits"),
    [("5", None), ("0.333", 3), ("0.0833333333333333", 15), ("1.50", 3), ("1.5e3", 2), (r"\frac{1.5}{2}", None)],
)
def test_significant_digits(text, digits):
    number = parse_number(tokenize(text))
    assert number is not None
    assert number.digits == digits


@pytest.mark.parametrize("text", ["28%", r"28\%", "28 percent", "28 pct", r"28\text{ percent}", r"28\text{\%}"])
def test_percent(text):
    assert parse_number(tokenize(text)) == Number(Fraction(28), is_percent=True)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("0.5", "0.50", True),
        ("2/3", "0.6667", False),
        ("2/3", "0.666666666666667", True),  # 15 digits
        ("2/3", "0.66666666666667", False),  # 14 digits
        ("3/10", "0.30000000000000004", True),  # a float printed in full
        ("2/3", "0.666666666666661", False),
        ("4", "4.000000000000001", True),
        ("10000", "10001", False),
        ("1000000007", "1000000009", False),
        ("123456789012345", "123456789012345.6", False),  # 16 digits, but integers have neighbours
        ("28%", "28", True),
        ("28%", "0.28", True),
        ("28%", "2800", False),
        ("28%", "28%", True),
        ("50%", "5000%", False),
        ("0.05", "5", False),
    ],
)
def test_equal_numbers_both_ways_round(first, second, expected):
    a, b = parse_number(tokenize(first)), parse_number(tokenize(second))
    assert a is not None
    assert b is not None
    assert equal_numbers(a, b) is expected
    assert equal_numbers(b, a) is expected
