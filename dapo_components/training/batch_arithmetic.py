"""How prompts, responses, optimizer steps, ranks and micro-batches fit together, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchArithmetic:
    """The sizes of one rollout step.

    Args:
        prompts_per_step: Prompts (groups) trained on per rollout step, over all ranks.
        group_size: Responses per prompt.
        responses_per_update: Responses per optimizer step, over all ranks; None takes the whole rollout at once.
        epochs_per_rollout: Passes over a rollout.
        world_size: Number of ranks.
        max_prompt_length: Prompt budget in tokens.
        max_response_length: Response budget in tokens.
        max_tokens_per_micro_batch: Tokens that one forward-backward pass of one rank may hold.

    Raises:
        ValueError: If a number is out of range or does not divide; the message says which to change.

    Example:
        >>> sizes = BatchArithmetic(prompts_per_step=512, group_size=16, responses_per_update=512, world_size=8,
        ...                         max_prompt_length=2048, max_response_length=20480, max_tokens_per_micro_batch=22528)
        >>> sizes.updates_per_rollout, sizes.prompts_per_update_and_rank
        (16, 4)
    """

    prompts_per_step: int
    group_size: int
    responses_per_update: int | None = None
    epochs_per_rollout: int = 1
    world_size: int = 1
    max_prompt_length: int
    max_response_length: int
    max_tokens_per_micro_batch: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.prompts_per_step % self.world_size:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} must be a multiple of the {self.world_size} ranks; "
                f"take {_round_up(self.prompts_per_step, self.world_size)}"
            )
        if self.responses_per_step % self.update_size or self.update_size % self.group_size:
            raise ValueError(
                f"responses_per_update={self.update_size} must divide prompts_per_step * group_size = "
                f"{self.prompts_per_step} * {self.group_size} = {self.responses_per_step} and be a multiple of "
                f"group_size={self.group_size}, so that groups stay whole"
            )
        if (self.update_size // self.group_size) % self.world_size:
            raise ValueError(
                f"responses_per_update={self.update_size} is {self.update_size // self.group_size} groups, which "
                f"{self.world_size} ranks cannot share evenly; take a multiple of {self.group_size * self.world_size}"
            )
        if self.max_sequence_length > self.max_tokens_per_micro_batch:
            raise ValueError(
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} cannot hold one sequence "
                f"of max_prompt_length + max_response_length = {self.max_sequence_length} tokens; raise it"
            )

    def check_model_length(self, max_model_length: int | None) -> None:
        """Refuse sequences that a model or an engine cannot hold.

        Raises:
            ValueError: If prompt and response together may be longer than ``max_model_length``.
        """
        if max_model_length is not None and self.max_sequence_length > max_model_length:
            raise ValueError(
                f"max_prompt_length + max_response_length = {self.max_sequence_length} tokens exceed the "
                f"{max_model_length} of the model or generator; shorten one of them"
            )

    @property
    def responses_per_step(self) -> int:
        """Responses of a rollout step, over all ranks."""
        return self.prompts_per_step * self.group_size

    @property
    def update_size(self) -> int:
        """Responses per optimizer step, over all ranks."""
        return self.responses_per_step if self.responses_per_update is None else self.responses_per_update

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps per pass over a rollout."""
        return self.responses_per_step // self.update_size

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps per rollout step."""
        return self.updates_per_epoch * self.epochs_per_rollout

    @property
    def prompts_per_rank(self) -> int:
        """Groups of a rollout step that one rank collects."""
        return self.prompts_per_step // self.world_size

    @property
    def prompts_per_update_and_rank(self) -> int:
        """Groups of an optimizer step that one rank holds."""
        return self.update_size // self.group_size // self.world_size

    @property
    def max_sequence_length(self) -> int:
        """Longest prompt with its response, in tokens."""
        return self.max_prompt_length + self.max_response_length

    def describe(self) -> str:
        """Return the sizes as lines of text for a dry run."""
        rows_per_pass = self.max_tokens_per_micro_batch // self.max_sequence_length
        passes = -(-self.prompts_per_update_and_rank * self.group_size // rows_per_pass)
        return "\n".join(
            [
                f"prompts per step              {self.prompts_per_step:>10,} ({self.prompts_per_rank:,} per rank, "
                f"{self.world_size} rank{'s' if self.world_size > 1 else ''})",
                f"responses per step            {self.responses_per_step:>10,} (groups of {self.group_size})",
                f"optimizer steps per rollout   {self.updates_per_rollout:>10,} ({self.epochs_per_rollout} pass"
                f"{'es' if self.epochs_per_rollout > 1 else ''} of {self.updates_per_epoch})",
                f"responses per optimizer step  {self.update_size:>10,} "
                f"({self.prompts_per_update_and_rank * self.group_size:,} per rank)",
                f"longest sequence              {self.max_sequence_length:>10,} tokens "
                f"(prompt {self.max_prompt_length:,} + response {self.max_response_length:,})",
                f"tokens per micro-batch        {self.max_tokens_per_micro_batch:>10,} at most, per rank; "
                f"at most {passes:,} passes per optimizer step if every response is as long as allowed",
            ]
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
