r"""Final answers as tokens: one spelling for the many ways of typing the same thing, in time linear in the length.

``\dfrac12``, ``\frac{1}{2}`` and ``½`` give the same tokens, as do ``10,\!080``, ``10{,}080`` and ``10,080``. Nothing
is evaluated here and unknown commands are kept as they are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal, NamedTuple

MAX_ANSWER_LENGTH = 2000
"""Longest final answer that is taken apart, in characters; longer ones are only compared as they stand."""


class Token(NamedTuple):
    """One piece of an answer.

    Args:
        kind: ``number`` (digits as written, without thousands separators), ``word`` (a run of letters), ``text``
            (content of a text command), ``command`` or ``symbol``.
        value: Its text.
        spaced: Whether a blank precedes it.
    """

    kind: Literal["number", "word", "text", "command", "symbol"]
    value: str
    spaced: bool = False


_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi "
    "psi omega"
).split()
# The Greek block has a second, word-final sigma between rho and sigma.
_GREEK_CODES = (*range(0x3B1, 0x3C2), *range(0x3C3, 0x3CA))
_FRACTIONS = {
    "¼": "1/4",
    "½": "1/2",
    "¾": "3/4",
    "⅓": "1/3",
    "⅔": "2/3",
    "⅕": "1/5",
    "⅖": "2/5",
    "⅗": "3/5",
    "⅘": "4/5",
}
_EIGHTHS = {"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
_CHARACTERS = {
    # Hyphens, dashes and minus signs; multiplication signs; fraction and division slashes.
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00d7\u2217\u22c5\u00b7", "*"),
    **dict.fromkeys("\u2044\u2215\u00f7", "/"),
    **{"√": "\\sqrt ", "±": "\\pm ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\neq ", "≈": "\\approx "},
    **{"\u222a": "\\cup ", "∅": "\\emptyset ", "°": "^\\circ ", "º": "^\\circ "},
    **{character: f" {value}" for character, value in (_FRACTIONS | _EIGHTHS).items()},
    **{character: f"^{digit}" for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{character: f"_{digit}" for digit, character in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **{chr(code): f"\\{name} " for code, name in zip(_GREEK_CODES, _GREEK, strict=True)},
}
_TRANSLATION = str.maketrans(_CHARACTERS)

_ALIASES = {
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("\\cdot", "\\times", "\\ast"), "*"),
    **{"\\div": "/", "\\%": "%", "\\lt": "<", "\\gt": ">", "\\leq": "\\le", "\\geq": "\\ge", "\\ne": "\\neq"},
    **{"\\leqslant": "\\le", "\\geqslant": "\\ge", "\\degree": "\\circ", "\\varnothing": "\\emptyset"},
    **{"**": "^", "<=": "\\le", ">=": "\\ge", "!=": "\\neq", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\vert": "|"},
}
_TEXT_COMMANDS = frozenset(
    "\\" + name
    for name in "text textbf textit textrm textsc texttt textnormal mbox hbox mathrm mathbf mathit mathsf operatorname "
    "boxed fbox".split()
)
# Sizes, styles and delimiters that say nothing about the value.
_IGNORED = frozenset(
    "\\" + name
    for name in "left right big bigl bigr Big Bigl Bigr bigg biggl biggr Bigg Biggl Biggr displaystyle textstyle "
    "limits $ ( ) [ ] !".split()
) | frozenset("$€£¥")
_SPACING = re.compile(r"\s+|~|\\(?:[,;:>\s]|q?quad(?![A-Za-z])|(?:thin|med|thick)?space(?![A-Za-z]))")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")
_EXPONENT = r"(?:[eE][+-]?[0-9]+(?![A-Za-z]))?"
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)" + _EXPONENT)
# "1,234,567.5" and "1 234 567", but not "7 300/4", which is a mixed number, nor the end of the list "5,99,100".
_GROUPED_NUMBER = re.compile(
    r"(?<!,)[0-9]{1,3}(?:(?:,[0-9]{3})+(?!,?[0-9])(?:\.[0-9]+)?|(?: [0-9]{3})+(?! ?[0-9])(?!\s*/)(?:\.[0-9]+)?)"
)
_REWRITES = (
    (re.compile(r"(?<!\\)\\[,;:>]"), " "),  # thin spaces, which also separate thousands
    (re.compile(r",[ \t]*\\![ \t]*"), ","),  # 10,\!080
    (re.compile(r" ?\{ ?, ?\} ?"), ","),  # 10{,}080
    (re.compile(r"\\[dtc]?frac\s*([0-9])(?=\s*[0-9{\\])"), r"\\frac{\1}"),  # \frac12, \frac9{19}
    (re.compile(r"(\\frac\{[0-9]\})\s*([0-9])"), r"\1{\2}"),
)


def fold(text: str) -> str:
    """Return ``text`` with look-alike characters replaced by ASCII and LaTeX, and invisible ones removed.

    Example:
        >>> fold("\u2212\uff15\u00bd")
        '-5 1/2'
    """
    if text.isascii():
        return text
    folded = unicodedata.normalize("NFKC", text.translate(_TRANSLATION)).translate(_TRANSLATION)
    return "".join(character for character in folded if unicodedata.category(character) != "Cf")


def tokenize(text: str) -> list[Token]:
    r"""Split a final answer into tokens; single-token groups lose their braces.

    Args:
        text: A final answer of at most :data:`MAX_ANSWER_LENGTH` characters.

    Example:
        >>> [token.value for token in tokenize(r"$\dfrac{1}2$ and 1,234.50")]
        ['\\frac', '1', '2', 'and', '1234.50']
    """
    text = fold(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    ends = _matching_braces(text)
    tokens: list[Token] = []
    position, depth, spaced = 0, 0, False
    while position < len(text):
        if match := _SPACING.match(text, position):
            position, spaced = match.end(), True
            continue
        token, position = _next_token(text, position, ends, in_brackets=depth > 0)
        if token is None:
            continue
        depth = max(0, depth + _depth_change(token))
        _append(tokens, token._replace(spaced=spaced and bool(tokens)))
        spaced = False
    return tokens


def canonical(tokens: Sequence[Token]) -> str:
    r"""Return one line that is equal for two answers that differ in spelling only.

    Example:
        >>> canonical(tokenize(r"\sqrt{3}")) == canonical(tokenize(r"\sqrt 3"))
        True
    """
    return " ".join(" ".join(token.value.split()) for token in tokens)


def _next_token(text: str, position: int, ends: dict[int, int], *, in_brackets: bool) -> tuple[Token | None, int]:
    """Read one token; ``None`` for what is ignored. Brackets keep commas apart: (1,234) is a pair."""
    if text[position] == "\\" and (match := _COMMAND.match(text, position)):
        name, after = match[0], match.end()
        if name in _TEXT_COMMANDS:
            opened = after + len(text[after:]) - len(text[after:].lstrip())
            if (end := ends.get(opened)) is not None:
                return Token("text", text[opened + 1 : end]), end + 1
        if name in _IGNORED:
            return None, after
        name = _ALIASES.get(name, name)
        return Token("command" if name[0] == "\\" else "symbol", name), after
    grouped = None if in_brackets else _GROUPED_NUMBER.match(text, position)
    if grouped:
        return Token("number", grouped[0].replace(",", "").replace(" ", "")), grouped.end()
    if match := _NUMBER.match(text, position):
        return Token("number", match[0]), match.end()
    if match := _WORD.match(text, position):
        return Token("word", match[0]), match.end()
    pair = text[position : position + 2]
    symbol = pair if pair in _ALIASES else text[position]
    after = position + len(symbol)
    if symbol in _IGNORED:
        return None, after
    name = _ALIASES.get(symbol, symbol)
    return Token("command" if name[0] == "\\" else "symbol", name), after


def _append(tokens: list[Token], token: Token) -> None:
    """Add a token; a closing brace dissolves an empty group and a group of one."""
    closes = token.kind == "symbol" and token.value == "}"
    if closes and tokens and tokens[-1].value == "{":
        tokens.pop()
    elif closes and len(tokens) > 1 and tokens[-2].value == "{":
        inner = tokens.pop()
        tokens[-1] = inner._replace(spaced=tokens[-1].spaced)
    else:
        tokens.append(token)


def _depth_change(token: Token) -> int:
    if token.kind in ("symbol", "command"):
        return (token.value in ("(", "[", "\\{", "\\langle")) - (token.value in (")", "]", "\\}", "\\rangle"))
    return 0


def _matching_braces(text: str) -> dict[int, int]:
    """Return the position of the closing brace for each opening one, in one pass."""
    opened: list[int] = []
    ends: dict[int, int] = {}
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            ends[opened.pop()] = match.start()
    return ends
