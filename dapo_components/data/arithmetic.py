"""Addition problems that code generates: the embedded default's data, with held-out problems never trained on.

A problem reads ``347+286?``. Whatever a response says before it, its answer is what follows ``#`` at its end.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from dapo_components.data.chat import PromptTemplate
from dapo_components.data.extraction import after_last
from dapo_components.data.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Split = Literal["train", "test"]

ANSWER_MARK = "#"
HELD_OUT_SHARE = 0.1

ADDITION_TEMPLATE = PromptTemplate(
    name="addition", format="{problem}?", extract=after_last(ANSWER_MARK), answer_ends="response"
)
"""``347+286?`` asks and the number after the last ``#`` answers."""


@final
@dataclass(frozen=True)
class Addition:
    """Two numbers to add.

    Args:
        left: First number.
        right: Second number.

    Example:
        >>> Addition(347, 286).question, Addition(347, 286).answer
        ('347+286', '633')
    """

    left: int
    right: int

    @property
    def question(self) -> str:
        """The problem without the template around it."""
        return f"{self.left}+{self.right}"

    @property
    def answer(self) -> str:
        """The sum in decimal."""
        return str(self.left + self.right)

    @property
    def is_held_out(self) -> bool:
        """Whether the problem belongs to the test split: a property of the two numbers, whatever their order.

        One pair in ten, by a hash; so no seed and no number of problems lets a test problem into training.
        """
        low, high = sorted((self.left, self.right))
        digest = hashlib.blake2b(f"{low}+{high}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def draw_additions(num_problems: int, *, split: Split, num_digits: int, seed: int) -> list[Addition]:
    """Return distinct problems of a split, in an order that ``seed`` decides.

    Args:
        num_problems: How many.
        split: ``train`` or ``test``; no pair of numbers is in both, in either order.
        num_digits: Digits of each number, without leading zeros.
        seed: Decides which problems are drawn.

    Raises:
        ValueError: If an argument is out of range or the split has fewer problems.

    Example:
        >>> [problem.question for problem in draw_additions(3, split="test", num_digits=3, seed=0)]
        ['988+627', '646+419', '179+604']
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    if not 1 <= num_digits <= 4:
        raise ValueError(f"num_digits must be in [1, 4], got {num_digits}")
    if num_problems < 1:
        raise ValueError(f"num_problems must be >= 1, got {num_problems}")
    rng = random.Random(f"{seed}/{split}/{num_digits}")
    first = 10 ** (num_digits - 1)
    num_pairs = (9 * first) ** 2
    seen: set[int] = set()
    problems: list[Addition] = []
    while len(problems) < num_problems:
        if len(seen) == num_pairs:
            raise ValueError(
                f"num_problems must be <= {len(problems)}, the size of the {split} split with {num_digits} digits, "
                f"got {num_problems}; raise num_digits"
            )
        index = rng.randrange(num_pairs)
        if index not in seen:
            seen.add(index)
            problem = Addition(first + index // (9 * first), first + index % (9 * first))
            if problem.is_held_out == (split == "test"):
                problems.append(problem)
    return problems


@final
class ArithmeticProblems:
    """A prompt data set of generated addition problems.

    Args:
        tokenizer: A fast tokenizer that knows digits, ``+`` and ``?``.
        split: ``train`` or ``test``.
        num_problems: How many distinct problems.
        seed: Decides which problems of the split, and their order.
        num_digits: Digits of each number.
        max_prompt_length: Longest prompt, in tokens; all prompts are equally hard, so a longer one is an error.

    Attributes:
        num_dropped: Always empty: nothing is dropped.
        fingerprint: SHA-256 over the problems and their tokens.

    Raises:
        ValueError: If an argument is out of range or a prompt is longer than ``max_prompt_length``.

    Example:
        >>> dataset = ArithmeticProblems(tokenizer, split="test", num_problems=256, seed=0)  # doctest: +SKIP
        >>> dataset[0].columns  # doctest: +SKIP
        {'problem': '347+286', 'answer': '633'}
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        split: Split = "train",
        num_problems: int,
        seed: int,
        num_digits: int = 3,
        max_prompt_length: int = 16,
    ) -> None:
        self.template = ADDITION_TEMPLATE
        self.num_dropped: dict[str, int] = {}
        digest = hashlib.sha256()
        self._prompts: list[Prompt] = []
        for problem in draw_additions(num_problems, split=split, num_digits=num_digits, seed=seed):
            text, tokens = self.template.encode(tokenizer, problem.question)
            if len(tokens) > max_prompt_length:
                raise ValueError(
                    f"max_prompt_length must be >= {len(tokens)} for {text!r}, got {max_prompt_length}; "
                    "raise it or lower num_digits"
                )
            columns = {"problem": problem.question, "answer": problem.answer}
            self._prompts.append(Prompt(len(self._prompts), text, tuple(tokens), columns))
            digest.update(json.dumps([text, tokens]).encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        """Return the prompt whose ``prompt_id`` is ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt_id must be in [0, {len(self)}), got {index}")
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        """Iterate over the prompts in order."""
        return iter(self._prompts)
