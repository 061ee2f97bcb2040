"""Imperfect worked answers to addition problems, for a supervised warm-up before DAPO.

Three styles are mixed; for ``347+286?`` they are

- guess: ``#633``. Short, and the sum is often wrong.
- steps: ``7+6=13,4+8+1=13,3+2+1=06#633``. Column by column from the right, the carry as last summand; now and then a
  carry is forgotten.
- ramble: the same steps over and over before the answer, so that the token budget may run out.

A policy that imitates the mixture mostly guesses. Reinforcement learning finds that working in steps pays, and that
rambling pays less.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from dapo_components.data.arithmetic import ADDITION_TEMPLATE, ANSWER_MARK, Addition, draw_additions

IGNORED_LABEL = -100
"""What ``torch.nn.CrossEntropyLoss`` leaves out by default."""


class SFTTokenizer(Protocol):
    """What torchtune's recipes call a tokenizer."""

    pad_id: int

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Return the ids of ``text``."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class DemonstrationMix:
    """How often each style and each mistake occurs.

    Args:
        steps_share: Share of demonstrations in steps.
        ramble_share: Share of rambling ones; the rest are guesses.
        guess_accuracy: Share of guesses with the right sum.
        slip_rate: Probability that a carry is forgotten.
        max_passes: A rambling demonstration goes through the columns 2 to this many times.

    Raises:
        ValueError: If a share is outside [0, 1] or ``max_passes`` is below 2.
    """

    steps_share: float = 0.35
    ramble_share: float = 0.07
    guess_accuracy: float = 0.25
    slip_rate: float = 0.12
    max_passes: int = 3

    def __post_init__(self) -> None:
        for name in ("steps_share", "ramble_share", "guess_accuracy", "slip_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if self.steps_share + self.ramble_share > 1:
            raise ValueError(
                f"steps_share + ramble_share must be <= 1, got {self.steps_share} + {self.ramble_share}; "
                "the rest are guesses"
            )
        if self.max_passes < 2:
            raise ValueError(f"max_passes must be >= 2, got {self.max_passes}")


def demonstrate(problem: Addition, mix: DemonstrationMix, rng: random.Random) -> str:
    """Return one response to ``problem`` in a style drawn from ``mix``.

    Example:
        >>> demonstrate(Addition(347, 286), DemonstrationMix(steps_share=1, ramble_share=0), random.Random(0))
        '7+6=13,4+8+1=13,3+2+1=06#633'
    """
    draw = rng.random()
    if draw < mix.steps_share:
        return work_in_steps(problem, rng, slip_rate=mix.slip_rate)
    if draw < mix.steps_share + mix.ramble_share:
        return work_in_steps(problem, rng, slip_rate=mix.slip_rate, num_passes=rng.randint(2, mix.max_passes))
    return guess(problem, rng, accuracy=mix.guess_accuracy)


def guess(problem: Addition, rng: random.Random, *, accuracy: float) -> str:
    """Answer at once.

    Args:
        problem: What to add.
        rng: Decides whether the answer is right and, if not, by how much it is off.
        accuracy: Probability of the right sum.

    Example:
        >>> guess(Addition(347, 286), random.Random(0), accuracy=1.0)
        '#633'
    """
    total = problem.left + problem.right
    if rng.random() >= accuracy:
        total += rng.choice((-1, 1)) * rng.choice((1, 2, 10, 20, 100))
    return f"{ANSWER_MARK}{abs(total)}"


def work_in_steps(problem: Addition, rng: random.Random, *, slip_rate: float, num_passes: int = 1) -> str:
    """Add column by column, from the right; the first digit of a column's sum is the carry.

    Args:
        problem: What to add; both numbers have the same number of digits.
        rng: Decides about slips.
        slip_rate: Probability that a carry of 1 is taken for 0.
        num_passes: How often to go through the columns; the last pass gives the answer.

    Example:
        >>> work_in_steps(Addition(58, 61), random.Random(0), slip_rate=0.0)
        '8+1=09,5+6+0=11#119'
    """
    columns: list[str] = []
    answer = ""
    for _ in range(num_passes):
        carry, answer = 0, ""
        for place, digits in enumerate(zip(reversed(str(problem.left)), reversed(str(problem.right)), strict=True)):
            summands = [*map(int, digits), carry][: 3 if place else 2]
            total = sum(summands)
            columns.append(f"{'+'.join(map(str, summands))}={total:02d}")
            answer = f"{total % 10}{answer}"
            carry = total // 10 if rng.random() >= slip_rate else 0
        answer = f"{carry or ''}{answer}"
    return f"{','.join(columns)}{ANSWER_MARK}{answer}"


@final
class AdditionDemonstrations(torch.utils.data.Dataset):
    """Demonstrations packed into rows of equal length, for torchtune's fine-tuning recipes (``packed: true``).

    An item holds ``tokens``, ``labels`` (the prompt's are ignored), ``input_pos`` (each demonstration starts at 0) and
    ``seq_lens``, each a tensor, as ``torchtune.data.padded_collate_packed`` takes them. Problems are of the ``train``
    split only.

    Args:
        tokenizer: A tokenizer as torchtune's recipes use it.
        num_demonstrations: How many problems, one demonstration each.
        seed: Decides problems, styles and mistakes.
        num_digits: Digits of each number.
        mix: Arguments of :class:`DemonstrationMix`; its defaults where absent.
        row_length: Tokens in a row.
        packed: Must be True; the recipe reads it from the config to choose its collate function.

    Raises:
        ValueError: If an argument is out of range or a demonstration is longer than a row.

    Example:
        >>> rows = AdditionDemonstrations(tokenizer, num_demonstrations=1000, seed=0)  # doctest: +SKIP
        >>> rows[0]["tokens"].shape  # doctest: +SKIP
        torch.Size([256])
    """

    def __init__(
        self,
        tokenizer: SFTTokenizer,
        *,
        num_demonstrations: int,
        seed: int,
        num_digits: int = 3,
        mix: dict[str, Any] | None = None,
        row_length: int = 256,
        packed: bool = True,
    ) -> None:
        if not packed:
            raise ValueError("packed must be true: the rows hold several demonstrations, got packed=False")
        styles = DemonstrationMix(**(mix or {}))
        rng = random.Random(f"{seed}/demonstrations")
        self.pad_id = tokenizer.pad_id
        self.row_length = row_length
        self._rows: list[list[tuple[list[int], list[int]]]] = [[]]
        for problem in draw_additions(num_demonstrations, split="train", num_digits=num_digits, seed=seed):
            prompt = ADDITION_TEMPLATE.request(problem.question)
            response = demonstrate(problem, styles, rng)
            self._append(
                tokenizer.encode(prompt, add_bos=False, add_eos=False),
                tokenizer.encode(response, add_bos=False, add_eos=True),
            )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one row."""
        tokens: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        for prompt, response in self._rows[index]:
            tokens += prompt + response
            labels += [IGNORED_LABEL] * len(prompt) + response
            lengths.append(len(prompt) + len(response))
            positions += range(lengths[-1])
        padding = self.row_length - len(tokens)
        columns = {
            "tokens": tokens + [self.pad_id] * padding,
            "labels": labels + [IGNORED_LABEL] * padding,
            "input_pos": positions + [0] * padding,
            "seq_lens": lengths + [padding] * (padding > 0),
        }
        return {name: torch.tensor(values) for name, values in columns.items()}

    def _append(self, prompt: list[int], response: list[int]) -> None:
        length = len(prompt) + len(response)
        if length > self.row_length:
            raise ValueError(f"row_length must be >= {length}, the length of a demonstration, got {self.row_length}")
        if sum(len(before) + len(after) for before, after in self._rows[-1]) + length > self.row_length:
            self._rows.append([])
        self._rows[-1].append((prompt, response))
