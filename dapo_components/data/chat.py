r"""Prompt templates, each paired with the function that reads the answer it asks for.

A reward that looks for ``\boxed{}`` scores zero for ever when the prompt asked for "Answer:". Keeping both in one
object makes that mistake impossible: the dataset and the reward are given the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from dapo_components.data.extraction import last_answer_line, last_boxed, last_hash_line, whole_response
from dapo_components.data.names import import_object, nearest_name
from dapo_components.data.tokenizer import bos_id, eos_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SLOT = "{problem}"


@final
@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    r"""How a problem becomes a prompt, and how its answer is read from the response.

    Args:
        name: What configs call it.
        format: Text of the request with ``{problem}`` once in it; other braces stand for themselves.
        extract: Returns the stated answer of a response, ``None`` if there is none.
        answer_ends: What closes the answer: its own ``"mark"`` (a brace), the end of the ``"line"`` or of the
            ``"response"``. A response cut at the length limit may stop inside an answer that has no mark of its own.
        chat: Use the tokenizer's chat template when it has one.
        system: System message of the chat, left out when ``None`` or without a chat template.

    Raises:
        ValueError: If ``format`` does not hold ``{problem}`` exactly once, or ``answer_ends`` is unknown.

    Example:
        >>> template = PromptTemplate(name="sum", format="{problem}=", extract=str.strip, answer_ends="response")
        >>> template.request("3+4")
        '3+4='
    """

    name: str
    format: str
    extract: Callable[[str], str | None]
    answer_ends: Literal["mark", "line", "response"] = "mark"
    chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        if self.format.count(_SLOT) != 1:
            raise ValueError(f"format must hold {_SLOT} exactly once, got {self.format!r}")
        if self.answer_ends not in ("mark", "line", "response"):
            raise ValueError(f"answer_ends must be 'mark', 'line' or 'response', got {self.answer_ends!r}")

    def request(self, problem: str) -> str:
        """Return the request for ``problem``, before any chat template."""
        return self.format.replace(_SLOT, problem)

    def encode(self, tokenizer: PreTrainedTokenizerFast, problem: str) -> tuple[str, list[int]]:
        """Return the prompt's text and ids.

        The ids begin with at most one BOS and do not end with the EOS that some tokenizers append.

        Args:
            tokenizer: A fast tokenizer.
            problem: The problem's text.
        """
        request = self.request(problem)
        if not (self.chat and tokenizer.chat_template):
            ids = list(tokenizer(request)["input_ids"])
            return request, _without_final_eos(_with_one_bos(ids, bos_id(tokenizer)), tokenizer)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": request})
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # The chat template writes the special tokens itself.
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return text, _with_one_bos(ids, bos_id(tokenizer))

    def read_answer(self, response: str, *, truncated: bool = False) -> str | None:
        """Return the stated answer, or ``None``.

        Args:
            response: The response's text, special tokens removed.
            truncated: Whether the length limit cut the response; an answer that the cut may have shortened is not read.

        Example:
            >>> get_template("answer_line").read_answer("Answer: 12", truncated=True) is None
            True
        """
        if truncated and self.answer_ends == "response":
            return None
        if truncated and self.answer_ends == "line":
            response = response[: response.rfind("\n") + 1]
        return self.extract(response)


def _with_one_bos(ids: list[int], bos: int | None) -> list[int]:
    """Drop repeated BOS ids at the front."""
    start = 0
    while bos is not None and ids[start : start + 2] == [bos, bos]:
        start += 1
    return ids[start:]


def _without_final_eos(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Drop an EOS that the tokenizer appended: generation would start after the end."""
    appended = len(ids) > 1 and ids[-1] == eos_id(tokenizer)
    return ids[:-1] if appended else ids


PROMPT_TEMPLATES: dict[str, PromptTemplate] = {
    template.name: template
    for template in (
        PromptTemplate(
            name="boxed",
            format="{problem}\n\nReason step by step, then state the final answer once, inside \\boxed{}.",
            extract=last_boxed,
            chat=True,
        ),
        PromptTemplate(
            name="answer_line",
            format="{problem}\n\nWork it out step by step. Finish with a line of its own that begins with"
            ' "Answer:" and holds nothing but the final answer.',
            extract=last_answer_line,
            answer_ends="line",
            chat=True,
        ),
        PromptTemplate(
            name="gsm8k",
            format="{problem}\n\nShow the calculation. On the last line write #### and then the resulting number.",
            extract=last_hash_line,
            answer_ends="line",
            chat=True,
        ),
        # The problem's text already says how to answer, as in DAPO-Math-17k.
        PromptTemplate(name="as_given_boxed", format=_SLOT, extract=last_boxed, chat=True),
        PromptTemplate(
            name="as_given_answer_line", format=_SLOT, extract=last_answer_line, answer_ends="line", chat=True
        ),
        PromptTemplate(name="plain", format=_SLOT, extract=whole_response, answer_ends="response"),
    )
}
"""The built-in templates by name."""


def get_template(template: str | PromptTemplate) -> PromptTemplate:
    r"""Return a template by name or by import path.

    Args:
        template: A key of :data:`PROMPT_TEMPLATES`, an import path ``"package.module:OBJECT"`` of a template of your
            own, or the template itself.

    Raises:
        ValueError: If there is no such template.

    Example:
        >>> get_template("gsm8k").read_answer("so 9 eggs\n#### 18")
        '18'
    """
    if isinstance(template, PromptTemplate):
        return template
    if isinstance(template, str) and template in PROMPT_TEMPLATES:
        return PROMPT_TEMPLATES[template]
    if isinstance(template, str) and ":" in template:
        found = import_object(template)
        if isinstance(found, PromptTemplate):
            return found
        raise ValueError(f"template {template!r} must name a PromptTemplate, got a {type(found).__name__}")
    raise ValueError(
        f"template must name a prompt template, got {template!r}; {nearest_name(str(template), PROMPT_TEMPLATES)} "
        "(or an import path 'package.module:OBJECT')"
    )
