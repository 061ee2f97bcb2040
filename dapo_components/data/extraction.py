r"""Finding the stated answer in a response: one function per way of marking it, each linear in the text's length.

A function returns the marked text as it stands, or ``None`` where the mark is missing. Whatever is right or wrong about
the answer is decided elsewhere. Thinking parts (``<think> ... </think>``) never hold the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# A box opens with a brace, or takes the next word ("\boxed 5"). Escaped characters are matched so that "\{" counts
# for nothing.
_BOX_OR_BRACE = re.compile(
    r"\\(?:boxed|fbox)(?:\s*(?P<open>\{)|\s+(?P<word>[^\s{}\\$]+))|\\.|(?P<brace>[{}])", re.DOTALL
)
_ANSWER_LINE = re.compile(r"answer\**\s*[:\uff1a]\s*([^\n]+)", re.IGNORECASE)


def drop_thinking(response: str) -> str:
    """Return what follows the last ``</think>``; a thinking part that never ends is dropped as well.

    Example:
        >>> drop_thinking("<think>12?</think>It is 15.")
        'It is 15.'
        >>> drop_thinking("<think>so it must be 5")
        ''
    """
    rest = response[response.rfind("</think>") + len("</think>") :] if "</think>" in response else response
    opened = rest.find("<think>")
    return rest if opened < 0 else rest[:opened]


def last_boxed(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces balance.

    Example:
        >>> last_boxed(r"First \boxed{4}, in the end \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
        >>> last_boxed(r"cut off: \boxed{12") is None
        True
    """
    text = drop_thinking(response)
    start = _first_box(text)
    if start < 0:
        return None
    open_braces: list[tuple[int, bool]] = []  # (position after the brace, opened by a box)
    best, best_start = None, -1
    for match in _BOX_OR_BRACE.finditer(text, start):
        if match["open"]:
            open_braces.append((match.end(), True))
        elif match["word"]:
            best, best_start = match["word"], match.end()
        elif match["brace"] == "{":
            open_braces.append((match.end(), False))
        elif match["brace"] == "}" and open_braces:
            opened, is_box = open_braces.pop()
            # An inner box closes before the outer one: the later start is the last box.
            if is_box and opened > best_start:
                best, best_start = text[opened : match.start()], opened
    return best


def last_answer_line(response: str) -> str | None:
    r"""Return the rest of the line after the last ``Answer:``, or the next line if nothing follows on the same one.

    Example:
        >>> last_answer_line("Answer: 41. No.\n**Answer:** 42")
        '42'
    """
    found = None
    for match in _ANSWER_LINE.finditer(drop_thinking(response)):
        found = match[1]
    return _without_markdown(found)


def last_hash_line(response: str) -> str | None:
    r"""Return the rest of the line after the last ``####``, the mark of GSM8K.

    Example:
        >>> last_hash_line("16 - 3 - 4 = 9 eggs\n#### 18")
        '18'
    """
    return after_last("####")(response)


def whole_response(response: str) -> str | None:
    r"""Return the whole response without surrounding blanks, ``None`` if nothing is left.

    Example:
        >>> whole_response("  42\n")
        '42'
    """
    return drop_thinking(response).strip() or None


def after_last(mark: str) -> Callable[[str], str | None]:
    """Make an extractor that returns the rest of the line after the last ``mark``.

    Args:
        mark: Text that precedes the answer, matched exactly.

    Raises:
        ValueError: If ``mark`` is empty.

    Example:
        >>> after_last("=>")("3+4 => 7")
        '7'
    """
    if not mark:
        raise ValueError("mark must not be empty, got ''")

    def extract(response: str) -> str | None:
        _, found, rest = drop_thinking(response).rpartition(mark)
        return _without_markdown(rest.split("\n", 1)[0]) if found else None

    return extract


def _first_box(text: str) -> int:
    """Return where the first box command stands, -1 without one."""
    positions = [position for command in ("\\boxed", "\\fbox") if (position := text.find(command)) >= 0]
    return min(positions, default=-1)


def _without_markdown(text: str | None) -> str | None:
    """Strip blanks and the stars of bold text; ``None`` if nothing is left."""
    return None if text is None else (text.strip().strip("*").strip() or None)
