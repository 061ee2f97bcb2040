r"""Reading one number from the tokens of an answer, exactly.

Integers, decimals, fractions (``a/b``, ``\frac``, ``\over``), mixed numbers, powers of ten, percent and units. Sums,
products and other work left to do are no numbers: a response must evaluate its answer, not restate the problem.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import final

from dapo_components.rewards.answer_tokens import Token

_MAX_EXPONENT = 400
"""Powers of ten beyond this are not built: their digits would cost time and no answer needs them."""
_MAX_DEPTH = 20
_FULL_PRECISION = 15
"""A decimal with this many significant digits stands for an exact value that it rounds to."""

_MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PERCENT_WORDS = frozenset({"percent", "pct", "percentage"})
# Words that change the value or name a second answer are no units.
_NOT_UNITS = frozenset(
    "and or not to of if no none either between than about pi sqrt sin cos tan cot sec csc log ln exp mod frac "
    "factorial squared cubed times plus minus over half third quarter dozen infinity percent pct infty root theta "
    "alpha beta".split()
) | frozenset(_MULTIPLIERS)
# Short words need to be known: "2ab" is a product.
_SHORT_UNITS = frozenset(
    "cm mm km dm nm ft in yd mi mg kg lb lbs oz ml cl dl sq hr hrs min mins sec ms hz khz mhz kwh kw mph kph rad deg "
    "mol pa kpa atm usd eur rmb day days week year cup cups man men hour mile inch foot feet yard gram cent ways way "
    "unit box cu per".split()
)


@final
@dataclass(frozen=True)
class Number:
    """A rational number as it was written.

    Args:
        value: Its exact value; for a percentage the number before the sign.
        digits: Significant digits if it was written as a decimal, ``None`` if it is exact.
        is_percent: Whether a percent sign or word follows.
    """

    value: Fraction
    digits: int | None = None
    is_percent: bool = False


def equal_numbers(first: Number, second: Number) -> bool:
    """Return whether two numbers are the same answer.

    Exact values must be equal. A decimal of 15 or more significant digits also equals a value that it rounds. A
    percentage equals the same number without the sign (the unit is forgiven) and its hundredth.

    Example:
        >>> equal_numbers(Number(Fraction(2, 3)), Number(Fraction("0.6667"), digits=4))
        False
        >>> equal_numbers(Number(Fraction(2, 3)), Number(Fraction("0.666666666666667"), digits=15))
        True
    """
    if first.is_percent == second.is_percent:
        return _close(first, second)
    percent, other = (first, second) if first.is_percent else (second, first)
    return _close(percent, other) or _close(replace(percent, value=percent.value / 100), other)


def parse_number(tokens: Sequence[Token]) -> Number | None:
    r"""Return the number that the tokens spell from first to last, ``None`` if they spell anything else.

    Example:
        >>> from dapo_components.rewards.answer_tokens import tokenize
        >>> parse_number(tokenize(r"-1\frac{1}{2} \text{ cm}")).value
        Fraction(-3, 2)
        >>> parse_number(tokenize("2 + 3")) is None
        True
    """
    reader = _Reader(tokens)
    number = reader.signed()
    if number is None:
        return None
    while reader.peek().value in _MULTIPLIERS or reader.peek().value.strip() in _MULTIPLIERS:
        number = replace(number, value=number.value * _MULTIPLIERS[reader.take().value.strip()])
    is_percent = reader.skip_percent()
    if not is_percent and not reader.skip_unit():
        return None
    return replace(number, is_percent=is_percent) if reader.at_end() else None


def _close(first: Number, second: Number) -> bool:
    difference = abs(first.value - second.value)
    if difference == 0:
        return True
    if max(first.digits or 0, second.digits or 0) < _FULL_PRECISION:
        return False
    allowed = max(abs(first.value), abs(second.value)) * Fraction(5, 10**_FULL_PRECISION)
    # Integers get no relative tolerance: a large one would swallow its neighbours.
    if first.value.denominator == 1 or second.value.denominator == 1:
        allowed = min(allowed, Fraction(1, 10**9))
    return difference <= allowed


_END = Token("symbol", "")


class _Reader:
    """Recursive descent over tokens; every method returns ``None`` where its form is not found."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0

    def peek(self, ahead: int = 0) -> Token:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else _END

    def take(self) -> Token:
        token = self.peek()
        self.position += 1
        return token

    def at_end(self) -> bool:
        return self.position >= len(self.tokens)

    def skip(self, value: str) -> bool:
        token = self.peek()
        if token.kind in ("symbol", "command") and token.value == value and not self.at_end():
            self.position += 1
            return True
        return False

    def signed(self) -> Number | None:
        is_negative = self.skip("-")
        if not is_negative:
            self.skip("+")
        number = self.unsigned()
        return replace(number, value=-number.value) if number is not None and is_negative else number

    def unsigned(self) -> Number | None:
        first = self.primary()
        if first is None:
            return None
        if self.skip("/") or self.skip("\\over"):
            return _quotient(first, self.primary())
        if first.value.denominator == 1 and first.digits is None and (part := self.mixed_part()) is not None:
            return Number(first.value + part.value)
        if self.peek().value == "*" and self.peek(1).value == "10" and self.peek(2).value == "^":
            self.position += 3
            return self.scaled(first)
        if first.value == 10 and self.skip("^"):
            return self.scaled(Number(Fraction(1)))
        return first

    def scaled(self, number: Number) -> Number | None:
        """Multiply by ten to the power that follows."""
        exponent = self.signed_or_group()
        if exponent is None or exponent.value.denominator != 1 or abs(exponent.value) > _MAX_EXPONENT:
            return None
        return replace(number, value=number.value * Fraction(10) ** int(exponent.value))

    def mixed_part(self) -> Number | None:
        r"""Read the fraction of a mixed number: ``\frac{1}{2}``, or ``1/2`` after a blank."""
        if self.peek().value == "\\frac":
            return self.primary()
        if self.peek().kind == "number" and self.peek().spaced and self.peek(1).value == "/":
            top = self.primary()
            self.skip("/")
            return _quotient(top, self.primary()) if top is not None else None
        return None

    def primary(self) -> Number | None:
        """Read a plain number, a fraction, or a number in brackets."""
        token = self.peek()
        if token.kind == "number":
            self.position += 1
            return _plain(token.value)
        if self.depth >= _MAX_DEPTH:
            return None
        self.depth += 1
        number = None
        if self.skip("\\frac"):
            top = self.signed_or_group()
            number = _quotient(top, self.signed_or_group()) if top is not None else None
        elif self.skip("("):
            number = self.signed()
            number = number if self.skip(")") else None
        elif token.value == "{":
            number = self.signed_or_group()
        self.depth -= 1
        return number

    def signed_or_group(self) -> Number | None:
        if not self.skip("{"):
            return self.signed() if self.peek().value in ("-", "+") else self.primary()
        number = self.signed() if self.depth < _MAX_DEPTH else None
        return number if number is not None and self.skip("}") else None

    def skip_percent(self) -> bool:
        if self.skip("%"):
            return True
        token = self.peek()
        if token.kind in ("word", "text") and token.value.strip().lower() in _PERCENT_WORDS | {"%", "\\%"}:
            self.position += 1
            return True
        return False

    def skip_unit(self) -> bool:
        """Skip a degree sign and unit words to the end; False if something else follows."""
        if self.peek().value == "^" and self.peek(1).value == "\\circ":
            self.position += 2
        elif self.skip("\\circ"):
            pass
        while not self.at_end():
            if not _is_unit(self.peek(), power_follows=self.peek(1).value == "^"):
                return False
            self.position += 1
            if self.skip("^") and self.take().value not in ("2", "3"):
                return False
            self.skip("/")
        return True


def _is_unit(token: Token, *, power_follows: bool) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", token.value)]
    if token.kind == "text":
        has_digits = re.search(r"[0-9]", re.sub(r"\^\{?-?[0-9]\}?", "", token.value)) is not None
        return bool(words) and not has_digits and "\\" not in token.value and not _NOT_UNITS.intersection(words)
    if token.kind != "word":
        return False
    (word,) = words
    if word in _NOT_UNITS:
        return False
    return word in _SHORT_UNITS or (len(word) >= 4 and token.spaced) or (word == "m" and power_follows)


def _plain(text: str) -> Number | None:
    """Read digits with an optional point and exponent."""
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and (len(exponent) > 6 or abs(int(exponent)) > _MAX_EXPONENT):
        return None
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    if "." not in mantissa:
        return Number(value)
    return Number(value, digits=len(mantissa.replace(".", "").lstrip("0")))


def _quotient(top: Number, bottom: Number | None) -> Number | None:
    return None if bottom is None or bottom.value == 0 else Number(top.value / bottom.value)
