"""The outcome reward of DAPO: right or wrong, by the answer that the prompt asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from dapo_components.data.chat import PromptTemplate, get_template
from dapo_components.rewards.math_answer import AnswerCheck, check_answer
from dapo_components.rewards.result import RewardResult


@final
class MathReward:
    r"""Score responses by comparing their answer with the column ``answer``.

    Section 3.1 of DAPO (arXiv:2503.14476): +1 for a right answer, -1 otherwise. A response without an answer, cut off
    before its answer, or with one that cannot be compared is wrong.

    Args:
        template: Prompt template that says how an answer is marked; give the data set the same.
        correct: Score of a right answer.
        incorrect: Score of anything else.
        timeout_s: Seconds after which no further stage of a comparison is started; a stage is never interrupted.

    Raises:
        ValueError: If the template is unknown, a score is not finite, ``correct <= incorrect`` or ``timeout_s <= 0``.

    Example:
        >>> reward = MathReward(template="boxed")
        >>> [result.score for result in reward(completions=[r"\boxed{4}", r"\boxed{5}"], answer=["4", "4"])]
        [1.0, -1.0]
    """

    def __init__(
        self,
        template: str | PromptTemplate = "boxed",
        correct: float = 1.0,
        incorrect: float = -1.0,
        timeout_s: float = 1.0,
    ) -> None:
        if not (math.isfinite(correct) and math.isfinite(incorrect) and correct > incorrect):
            raise ValueError(
                f"correct must be finite and above incorrect, got correct={correct}, incorrect={incorrect}"
            )
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
        self.template = get_template(template)
        self.correct = float(correct)
        self.incorrect = float(incorrect)
        self.timeout_s = timeout_s

    def __call__(
        self,
        prompts: Sequence[str] | None = None,
        completions: Sequence[str] = (),
        completion_ids: Sequence[Sequence[int]] | None = None,
        *,
        answer: Sequence[object],
        truncated: Sequence[bool] | None = None,
        **columns: Sequence[object],
    ) -> list[RewardResult]:
        """Return one result per completion.

        Args:
            prompts: Not used.
            completions: Response texts, special tokens removed.
            completion_ids: Not used.
            answer: Right answers.
            truncated: Whether the length limit cut each response; an answer that the cut may have shortened does not
                count.
            columns: Not used.

        Raises:
            ValueError: If there is not one answer per completion.
        """
        del prompts, completion_ids, columns
        cuts = [False] * len(completions) if truncated is None else truncated
        if not len(completions) == len(answer) == len(cuts):
            raise ValueError(
                f"answer and truncated must have one value per completion ({len(completions)}), "
                f"got {len(answer)} and {len(cuts)}"
            )
        return [self._score(*row) for row in zip(completions, answer, cuts, strict=True)]

    def _score(self, completion: str, answer: object, truncated: bool) -> RewardResult:
        extracted = self.template.read_answer(completion, truncated=bool(truncated))
        check: AnswerCheck = check_answer(extracted, str(answer), timeout_s=self.timeout_s)
        score = self.correct if check.correct else self.incorrect
        return RewardResult(score=score, correct=check.correct, extracted=check.extracted, status=check.status)
