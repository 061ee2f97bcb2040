"""Prompt data sets: rows of a file become encoded prompts, and nothing goes missing without being counted."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from dapo_components.data.chat import PromptTemplate, get_template
from dapo_components.data.names import nearest_name
from dapo_components.data.rows import Row, field_value, read_rows, shown
from dapo_components.data.tokenizer import bos_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


REWARD_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids", "truncated"})
"""What a reward function receives beside the columns of the data set."""


@final
@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        prompt_id: Its index in the data set.
        text: The prompt as the model sees it, chat template included.
        tokens: The prompt's ids.
        columns: What reward functions receive: ``problem``, ``answer`` and any other mapped column.
    """

    prompt_id: int
    text: str
    tokens: tuple[int, ...]
    columns: dict[str, Any]


class PromptSource(Protocol):
    """What a loader needs of a prompt data set."""

    fingerprint: str
    """Changes when the prompts do."""
    num_dropped: dict[str, int]
    """Rows left out, by reason."""

    def __len__(self) -> int:
        """Number of prompts."""
        ...

    def __getitem__(self, index: int) -> Prompt:
        """The prompt whose ``prompt_id`` is ``index``."""
        ...


@final
class PromptDataset:
    """Prompts from JSONL, Parquet or a Hugging Face data set, encoded once.

    Args:
        tokenizer: A fast tokenizer.
        source: File, folder or hub name; see :func:`dapo_components.data.rows.read_rows`.
        columns: Our name -> the source's column; ``problem`` is required. A dotted name walks nested fields. The column
            ``answer`` is turned into text. A ``problem`` may be text or a chat of one user message.
        template: Name of a prompt template, an import path, or the template.
        max_prompt_length: Longest prompt, in tokens.
        on_overlong: ``"drop"`` leaves longer prompts out, ``"truncate"`` keeps their end (and their BOS).
        on_malformed: ``"raise"`` stops at a row that cannot be used, ``"skip"`` counts it.
        split: Split of a Hugging Face data set.
        limit: Keep only that many prompts, the first ones.

    Attributes:
        num_dropped: Rows left out: ``{"malformed": ..., "overlong": ...}``.
        num_truncated: Prompts shortened by ``on_overlong="truncate"``.
        identity: What the fingerprint is made of, by name.
        fingerprint: SHA-256 over the prompts in order, their columns, their tokens and the template.

    Raises:
        ValueError: If an argument is out of range, the source does not exist, a column is missing, a row is malformed
            (file, line, what was expected and found), or no prompt is left.

    Example:
        >>> dataset = PromptDataset(tokenizer, source="train.jsonl", max_prompt_length=512)  # doctest: +SKIP
        >>> dataset[0].columns["answer"]  # doctest: +SKIP
        '18'
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        source: str | Path,
        columns: Mapping[str, str] | None = None,
        template: str | PromptTemplate = "boxed",
        max_prompt_length: int,
        on_overlong: Literal["drop", "truncate"] = "drop",
        on_malformed: Literal["raise", "skip"] = "raise",
        split: str = "train",
        limit: int | None = None,
    ) -> None:
        self.source = str(source)
        self.columns = dict(columns) if columns is not None else {"problem": "problem", "answer": "answer"}
        self.template = get_template(template)
        self.max_prompt_length = max_prompt_length
        self.on_overlong = on_overlong
        self.on_malformed = on_malformed
        self.limit = limit
        self._check_arguments()
        self.num_dropped = {"malformed": 0, "overlong": 0}
        self.num_truncated = 0
        self._texts: list[str] = []
        self._tokens: list[array] = []
        self._columns: list[dict[str, Any]] = []
        self._first_problem: str | None = None
        self._read(tokenizer, read_rows(source, split=split))
        if not self._texts:
            raise ValueError(self._nothing_left())
        self.identity = self._identify()
        self.fingerprint = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._texts)

    def __getitem__(self, index: int) -> Prompt:
        """Return the prompt whose ``prompt_id`` is ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt_id must be in [0, {len(self)}), got {index}")
        return Prompt(index, self._texts[index], tuple(self._tokens[index]), dict(self._columns[index]))

    def __iter__(self) -> Iterator[Prompt]:
        """Iterate over the prompts in order."""
        return (self[index] for index in range(len(self)))

    def _check_arguments(self) -> None:
        if "problem" not in self.columns:
            hint = nearest_name("problem", self.columns)
            raise ValueError(f"columns must map 'problem' to a column of the source, got {self.columns}; {hint}")
        if taken := sorted(REWARD_ARGUMENTS.intersection(self.columns)):
            raise ValueError(f"columns must not map {taken[0]!r}, which rewards receive from the collector; rename it")
        if self.max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be >= 1, got {self.max_prompt_length}")
        if self.on_overlong not in ("drop", "truncate"):
            raise ValueError(f"on_overlong must be 'drop' or 'truncate', got {self.on_overlong!r}")
        if self.on_malformed not in ("raise", "skip"):
            raise ValueError(f"on_malformed must be 'raise' or 'skip', got {self.on_malformed!r}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be >= 1 or null, got {self.limit}")

    def _read(self, tokenizer: PreTrainedTokenizerFast, rows: Iterator[Row]) -> None:
        for row in rows:
            if self.limit is not None and len(self) >= self.limit:
                return
            try:
                columns = self._row_columns(row)
            except _MalformedRowError as problem:
                message = f"{row.location}: {problem}"
                if self.on_malformed == "raise":
                    raise ValueError(f"{message}; set on_malformed to 'skip' to leave such rows out") from None
                self._first_problem = self._first_problem or message
                self.num_dropped["malformed"] += 1
                continue
            self._add(tokenizer, columns)

    def _row_columns(self, row: Row) -> dict[str, Any]:
        """Return the mapped columns of a row, or say what is wrong with it."""
        if row.problem is not None:
            raise _MalformedRowError(row.problem)
        columns = {}
        for ours, theirs in self.columns.items():
            try:
                columns[ours] = field_value(row.fields, theirs)
            except KeyError as error:
                raise _MalformedRowError(f"expected a value for {ours!r}: {error.args[0]}") from None
        columns["problem"] = _problem_text(columns["problem"], self.columns["problem"])
        if "answer" in columns:
            columns["answer"] = _answer_text(columns["answer"], self.columns["answer"])
        return columns

    def _add(self, tokenizer: PreTrainedTokenizerFast, columns: dict[str, Any]) -> None:
        text, ids = self.template.encode(tokenizer, columns["problem"])
        if len(ids) > self.max_prompt_length:
            if self.on_overlong == "drop":
                self.num_dropped["overlong"] += 1
                return
            self.num_truncated += 1
            ids = _keep_end(ids, self.max_prompt_length, bos_id(tokenizer))
        self._texts.append(text)
        self._tokens.append(array("i", ids))
        self._columns.append(columns)

    def _nothing_left(self) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in self.num_dropped.items())
        message = f"no prompt is left of {self.source!r} ({counts})"
        if self._first_problem:
            return f"{message}; the first malformed row is {self._first_problem}"
        if self.num_dropped["overlong"]:
            return f"{message}; raise max_prompt_length={self.max_prompt_length} or set on_overlong to 'truncate'"
        return f"{message}: it has no rows"

    def _identify(self) -> dict[str, str | int]:
        rows, tokens = hashlib.sha256(), hashlib.sha256()
        for columns, ids in zip(self._columns, self._tokens, strict=True):
            rows.update(json.dumps(columns, sort_keys=True, default=str).encode() + b"\n")
            tokens.update(ids.tobytes() + b"|")
        template = self.template
        return {
            "number of prompts": len(self),
            "rows": rows.hexdigest(),
            "tokens": tokens.hexdigest(),
            "template": json.dumps([template.name, template.format, template.chat, template.system]),
            "columns": json.dumps(self.columns),
        }


class _MalformedRowError(Exception):
    """A row that cannot be used; the message says what was expected and found."""


def _problem_text(value: object, column: str) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping) and value[0].get("role") == "user":
        value = value[0].get("content")
    if not isinstance(value, str):
        kind = type(value).__name__
        raise _MalformedRowError(
            f"expected text or a chat of one user message in column {column!r}, found {shown(value)} ({kind})"
        )
    if not value.strip():
        raise _MalformedRowError(f"expected a problem in column {column!r}, found empty text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _MalformedRowError(f"expected valid Unicode in column {column!r}, found half a character pair") from None
    return value


def _answer_text(value: object, column: str) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not (isinstance(value, str) or is_number):
        kind = type(value).__name__
        raise _MalformedRowError(
            f"expected text or a finite number in column {column!r}, found {shown(value)} ({kind})"
        )
    text = str(value).strip()
    if not text:
        raise _MalformedRowError(f"expected an answer in column {column!r}, found empty text")
    return text


def _keep_end(ids: list[int], length: int, bos: int | None) -> list[int]:
    """Shorten from the left; a BOS stays in front, because models are never run without theirs."""
    if bos is None or ids[0] != bos or length < 2:
        return ids[-length:]
    return [bos, *ids[-(length - 1) :]]
