r"""Deciding whether a response states the right answer.

Stages, each with a typed result: find the answer (:func:`extract_answer`), give it one spelling, read its value,
compare. Model text is untrusted: nothing is evaluated or executed, no stage does more than linear work in the text
(quadratic in the number of list items, which is bounded), and no text makes a function raise. Answers whose equality
needs algebra are reported as unparsed, never guessed.

Policy: exact golds need exact answers; a decimal equals an exact value only with 15 or more significant digits. Units,
currency and degree signs are forgiven, ``28%`` equals both ``28`` and ``0.28``. Lists and sets are unordered, tuples
ordered. ``x = 5`` equals ``5``. One answer only: ``5 or 6`` is wrong where the gold is ``5``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, final

from dapo_components.data.extraction import drop_thinking, last_boxed
from dapo_components.rewards.answer_tokens import MAX_ANSWER_LENGTH, Token, canonical, tokenize
from dapo_components.rewards.answer_values import Answer, equal_answers, is_understood, parse_answer

Status = Literal["ok", "no_answer", "unparsed_pred", "unparsed_gold", "too_costly", "timeout"]

_IS_RESPONSE = re.compile(r"\\boxed|\\fbox|answer|####|</?think|\n", re.IGNORECASE)
_MARKED_LINE = re.compile(
    r"(?:answer\**\s*[:\uff1a]|answer is(?:\s*:)?|####)\s*([^\n]+)",
    re.IGNORECASE,
)
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")
_ANSWER_IS = re.compile(r"answer is\s*:?", re.IGNORECASE)
_ENDING = " \t\r\n.,;:*"


@final
@dataclass(frozen=True, kw_only=True)
class AnswerCheck:
    """Verdict on one answer.

    Args:
        correct: Whether it equals the gold answer; only ever True with status ``ok``.
        status: ``ok`` (decided), ``no_answer`` (none found), ``unparsed_pred`` or ``unparsed_gold`` (equality of
            expressions that are not understood, taken as wrong), ``too_costly`` (too long to take apart), ``timeout``.
        extracted: The answer found, ``None`` without one.
        rule: What decided: ``integer``, ``identical`` (same spelling), ``value``, or ``none``.
        seconds: Time taken.
    """

    correct: bool
    status: Status
    extracted: str | None
    rule: str
    seconds: float


@final
@dataclass
class _Side:
    """One of the two answers; read at most once."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    _answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        if self._answer is None:
            self._answer = parse_answer(self.tokens)
        return self._answer


def _equal_integers(prediction: str, gold: str) -> bool | None:
    """Compare the commonest answers without taking them apart; None unless both are plain integers."""
    first, second = prediction.strip(), gold.strip()
    return int(first) == int(second) if _INTEGER.fullmatch(first) and _INTEGER.fullmatch(second) else None


def _identical(prediction: _Side, gold: _Side) -> bool | None:
    return True if canonical(prediction.tokens) == canonical(gold.tokens) else None


def _by_value(prediction: _Side, gold: _Side) -> bool | None:
    if equal_answers(prediction.answer, gold.answer):
        return True
    return False if is_understood(prediction.answer) and is_understood(gold.answer) else None


# Each stage returns True, False, or None where it cannot decide. Cheap ones first; one that does algebra goes last.
_STAGES: tuple[tuple[str, Callable[[_Side, _Side], bool | None]], ...] = (
    ("identical", _identical),
    ("value", _by_value),
)


def extract_answer(response: str) -> str | None:
    r"""Return the answer that a response states, however it marks it.

    Thinking parts are dropped and, if there is an ``<answer>`` tag, all but its content. The last balanced box counts;
    without one, what follows the last of ``Answer:``, ``the answer is`` and ``####``. No mark, no answer: a number
    somewhere in the text is none.

    Example:
        >>> extract_answer("The final answer is $24$. I hope it is correct.")
        '24'
        >>> extract_answer("I tried 5 but cannot prove it.") is None
        True
    """
    text = drop_thinking(response)
    tag_end = text.rfind("</answer>")
    tag_start = text.rfind("<answer>", 0, tag_end) if tag_end >= 0 else -1
    if tag_start >= 0:
        text = text[tag_start + len("<answer>") : tag_end]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    line = None
    for match in _MARKED_LINE.finditer(text):
        line = match[1]
    if line is not None:
        return _claimed(line)
    return (text.strip() or None) if tag_start >= 0 else None


def verify_answer(prediction: str, gold: str, *, timeout_s: float = 1.0) -> AnswerCheck:
    r"""Decide whether ``prediction`` states the answer ``gold``.

    Args:
        prediction: A whole response, or a bare answer: text without an answer mark and without line breaks.
        gold: The right answer, bare, or a worked solution that marks it.
        timeout_s: Time after which no further stage begins, in seconds.

    Returns:
        The verdict; text never raises.

    Raises:
        ValueError: If ``timeout_s`` is not positive.
        TypeError: If ``prediction`` or ``gold`` is not text.

    Example:
        >>> verify_answer(r"so $\boxed{\frac{1}{2}}$", "0.5").correct
        True
        >>> verify_answer("Answer: 41", "42").correct
        False
    """
    start = time.perf_counter()
    for name, value in (("prediction", prediction), ("gold", gold)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be text, got {value!r} ({type(value).__name__})")
    extracted = extract_answer(prediction) if _IS_RESPONSE.search(prediction) else prediction
    return check_answer(extracted, gold, timeout_s=timeout_s, start=start)


def check_answer(
    extracted: str | None, gold: str, *, timeout_s: float = 1.0, start: float | None = None
) -> AnswerCheck:
    """Compare an answer that has been found already, for example by a prompt template, with the gold answer.

    Args:
        extracted: The bare answer, ``None`` if there is none.
        gold: The right answer, bare, or a worked solution that marks it.
        timeout_s: Time after which no further stage begins, in seconds.
        start: When the work began, by ``time.perf_counter``; now by default.

    Raises:
        ValueError: If ``timeout_s`` is not positive.

    Example:
        >>> check_answer("1/2", "0.5").correct, check_answer(None, "0.5").status
        (True, 'no_answer')
    """
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
    start = time.perf_counter() if start is None else start

    def verdict(*, correct: bool, status: Status, rule: str = "none") -> AnswerCheck:
        seconds = time.perf_counter() - start
        return AnswerCheck(correct=correct, status=status, extracted=extracted, rule=rule, seconds=seconds)

    if extracted is None or not extracted.strip():
        return verdict(correct=False, status="no_answer")
    gold_answer = (extract_answer(gold) if _IS_RESPONSE.search(gold) else None) or gold
    if (same := _equal_integers(extracted, gold_answer)) is not None:
        return verdict(correct=same, status="ok", rule="integer")
    if max(len(extracted), len(gold_answer)) > MAX_ANSWER_LENGTH:
        same = extracted.strip() == gold_answer.strip()
        return verdict(correct=same, status="ok" if same else "too_costly", rule="identical" if same else "none")
    sides = _Side(extracted, _tokens(extracted)), _Side(gold_answer, _tokens(gold_answer))
    if not sides[0].tokens:
        return verdict(correct=False, status="no_answer")
    if not sides[1].tokens:
        return verdict(correct=False, status="unparsed_gold")
    for rule, stage in _STAGES:
        if time.perf_counter() - start > timeout_s:
            return verdict(correct=False, status="timeout")
        decided = stage(*sides)
        if decided is not None:
            return verdict(correct=decided, status="ok", rule=rule)
    return verdict(correct=False, status="unparsed_pred" if is_understood(sides[1].answer) else "unparsed_gold")


def _tokens(answer: str) -> list[Token]:
    """Tokens of an answer without the stars of bold text and the punctuation that ends a sentence."""
    tokens = tokenize(answer.strip().strip("*"))
    while tokens and tokens[-1].kind == "symbol" and tokens[-1].value in _ENDING:
        tokens.pop()
    return tokens


def _claimed(line: str) -> str | None:
    """Return the value in a sentence: the formula it begins with, or what follows its last "is"."""
    *_, line = _ANSWER_IS.split(line)
    line = line.lstrip(" \t*")
    if " is " in line and not line.startswith(("$", "\\(")):
        line = line.rpartition(" is ")[2].strip()
    sentence = line.partition(". ")[0]
    stripped = sentence.rstrip(_ENDING)
    if stripped.endswith("\\"):  # a final "\\," is a space command, not punctuation
        stripped = sentence[: len(stripped) + 1]
    for opener, closer in (("$", "$"), ("\\(", "\\)")):
        inner = stripped[len(opener) : -len(closer)]
        if stripped.startswith(opener) and stripped.endswith(closer) and closer not in inner:
            return inner.strip() or None
    return stripped or None
