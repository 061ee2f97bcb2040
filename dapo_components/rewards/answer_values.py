r"""What an answer says, by type: a number, a collection, words, a named value, or an expression left as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from dapo_components.rewards.answer_numbers import Number, equal_numbers, parse_number
from dapo_components.rewards.answer_tokens import Token, canonical, tokenize

_MAX_DEPTH = 12
_MAX_MATCHED = 64
_PAIRS = {"(": ")", "[": "]", "\\{": "\\}", "\\langle": "\\rangle", "{": "}"}
_CLOSERS = frozenset(_PAIRS.values())
_OPENERS = frozenset(_PAIRS)
_NAMING_COMMANDS = frozenset(
    "\\" + name
    for name in "frac angle overline triangle vec hat bar ell mathbb mathcal alpha beta gamma delta epsilon theta "
    "lambda mu nu rho sigma tau phi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega".split()
)


@final
@dataclass(frozen=True)
class Words:
    """A text answer, folded to lower case."""

    value: str


@final
@dataclass(frozen=True)
class Opaque:
    """An expression that is not understood; equal to the same spelling only."""

    value: str


@final
@dataclass(frozen=True)
class Named:
    """A value with its name: ``x = 5``."""

    name: str
    value: Answer


@final
@dataclass(frozen=True)
class Collection:
    """Several values.

    Args:
        items: The values in order of writing.
        brackets: Opening and closing bracket; empty for an unordered list or a set in curly brackets.
    """

    items: tuple[Answer, ...]
    brackets: str = ""


Answer = Number | Words | Opaque | Named | Collection


def parse_answer(tokens: Sequence[Token], depth: int = 0) -> Answer:
    """Return what the tokens of a non-empty answer say.

    Example:
        >>> parse_answer(tokenize("x = 5")).value.value
        Fraction(5, 1)
    """
    if depth >= _MAX_DEPTH:
        return Opaque(canonical(tokens))
    if len(tokens) == 1 and tokens[0].kind == "text" and (inner := tokenize(tokens[0].value)):
        return parse_answer(inner, depth + 1)
    number = parse_number(tokens)
    if number is not None:
        return number
    parts, is_union = _split(tokens)
    if len(parts) > 1:
        return Collection(tuple(parse_answer(part, depth + 1) for part in parts), "union" if is_union else "")
    special = _named(tokens, depth) or _plus_minus(tokens) or _bracketed(tokens, depth) or _words(tokens)
    return special or Opaque(canonical(tokens[1:] if tokens[0].value == "+" and len(tokens) > 1 else tokens))


def is_understood(answer: Answer) -> bool:
    """Return whether comparing by value decides, that is, no part is opaque."""
    match answer:
        case Opaque(value):
            return len(value) == 1 and value.isalpha() and value not in "ei"  # a letter; e and i have values
        case Named():
            return is_understood(answer.value)
        case Collection():
            return all(is_understood(item) for item in answer.items)
    return True


def equal_answers(first: Answer, second: Answer) -> bool:
    """Return whether two answers have the same value; symmetric.

    A named value equals the bare value, lists and sets are unordered, tuples and intervals are ordered and keep their
    brackets.
    """
    if isinstance(first, Named) or isinstance(second, Named):
        if isinstance(first, Named) and isinstance(second, Named):
            return first.name == second.name and equal_answers(first.value, second.value)
        named, bare = (first, second) if isinstance(first, Named) else (second, first)
        return isinstance(named, Named) and equal_answers(named.value, bare)
    if isinstance(first, Number) and isinstance(second, Number):
        return equal_numbers(first, second)
    if isinstance(first, Collection) and isinstance(second, Collection):
        return _equal_collections(first, second)
    return first == second


def _equal_collections(first: Collection, second: Collection) -> bool:
    if first.brackets != second.brackets or len(first.items) != len(second.items):
        return False
    if first.brackets not in ("", "union"):
        return all(equal_answers(a, b) for a, b in zip(first.items, second.items, strict=True))
    if len(first.items) > _MAX_MATCHED:  # matching item by item costs the square of their number
        return sorted(map(repr, first.items)) == sorted(map(repr, second.items))
    rest = list(second.items)
    for item in first.items:
        index = next((i for i, other in enumerate(rest) if equal_answers(item, other)), None)
        if index is None:
            return False
        del rest[index]
    return True


def _split(tokens: Sequence[Token]) -> tuple[list[Sequence[Token]], bool]:
    """Split at commas, semicolons, "and", "or" (a list) or union signs, outside brackets; empty parts are dropped."""
    depth, start, is_union = 0, 0, False
    parts: list[Sequence[Token]] = []
    for index, token in enumerate(tokens):
        if token.kind in ("symbol", "command"):
            depth += (token.value in _OPENERS) - (token.value in _CLOSERS)
        separates = depth == 0 and (token.value in (",", ";", "\\cup") or _is_joint(token))
        if separates:
            is_union = is_union or token.value == "\\cup"
            parts.append(tokens[start:index])
            start = index + 1
    parts.append(tokens[start:])
    return [part for part in parts if part], is_union


def _is_joint(token: Token) -> bool:
    return token.kind in ("word", "text") and token.value.strip().lower() in ("and", "or")


def _named(tokens: Sequence[Token], depth: int) -> Named | None:
    """Read ``name = ... = value``; the last part counts."""
    signs = [index for index, token in enumerate(tokens) if token.value in ("=", "\\approx") and token.kind != "text"]
    if not signs or signs[-1] + 1 >= len(tokens):
        return None
    left = tokens[: signs[0]]
    if not _is_name(left):
        return None
    if len(signs) > 1 and not _chain_ends(tokens, signs):
        return None
    return Named(canonical(left), parse_answer(tokens[signs[-1] + 1 :], depth + 1))


def _chain_ends(tokens: Sequence[Token], signs: Sequence[int]) -> bool:
    """Whether ``x = a = b`` ends in a number and states no other one: x = 4 = 5 names two answers."""
    last = parse_number(tokens[signs[-1] + 1 :])
    middle = (parse_number(tokens[start + 1 : end]) for start, end in pairwise(signs))
    return last is not None and all(number is None or equal_numbers(number, last) for number in middle)


def _is_name(tokens: Sequence[Token]) -> bool:
    """Whether the tokens name something: letters with subscripts, f(x), |AB|, tuples and ratios of such; no formula."""
    for index, token in enumerate(tokens):
        before = tokens[index - 1].value if index else ""
        if token.kind == "number":
            allowed = before == "_"
        elif token.kind in ("word", "text"):
            word = token.value.strip()
            allowed = word.isalpha() and (len(word) == 1 or len(word) > 3 or word.isupper() or before == "_")
        else:
            allowed = token.value in _NAMING_COMMANDS or token.value in "(){},:|_"
        if not allowed:
            return False
    return any(token.kind in ("word", "text") or token.value in _NAMING_COMMANDS for token in tokens)


def _plus_minus(tokens: Sequence[Token]) -> Collection | None:
    if tokens[0].value != "\\pm" or (number := parse_number(tokens[1:])) is None:
        return None
    return Collection((number, replace(number, value=-number.value)))


def _bracketed(tokens: Sequence[Token], depth: int) -> Answer | None:
    """Read a tuple, interval or set; round brackets around one value fall away."""
    opener, closer = tokens[0].value, tokens[-1].value
    if len(tokens) < 3 or opener not in _OPENERS or closer not in _CLOSERS or not _encloses(tokens):
        return None
    inner = tokens[1:-1]
    parts, is_union = _split(inner)
    is_set = opener == "\\{"
    if is_union or (len(parts) < 2 and not is_set):
        matches = opener in ("(", "{") and _PAIRS[opener] == closer
        return parse_answer(inner, depth + 1) if matches else None
    items = tuple(parse_answer(part, depth + 1) for part in parts)
    return Collection(items, "" if is_set else opener + closer)


def _encloses(tokens: Sequence[Token]) -> bool:
    """Whether the first bracket closes with the last token."""
    depth = 0
    for index, token in enumerate(tokens):
        if token.kind in ("symbol", "command"):
            depth += (token.value in _OPENERS) - (token.value in _CLOSERS)
        if depth == 0:
            return index == len(tokens) - 1
    return False


def _words(tokens: Sequence[Token]) -> Words | None:
    """Read a text answer: words of two letters or more, and the punctuation between them."""
    is_text = any(len(token.value) > 1 for token in tokens if token.kind in ("word", "text"))
    plain = all(
        token.kind == "text" or (token.kind == "word" and (len(token.value) > 1 or len(tokens) > 1))
        or token.value in ("-", "'", ".", "!", "?")
        for token in tokens
    )  # fmt: skip
    return Words(" ".join(canonical(tokens).lower().split())) if is_text and plain else None
