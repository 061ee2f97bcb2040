"""Names, shapes and dtypes of everything a batch can hold.

A batch is a ``TensorDict`` of batch size ``[B, G]``: ``B`` prompts with ``G`` responses each. ``P`` is the number of
prompt positions, ``T`` the number of response positions. Values at masked positions are undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Key = str | tuple[str, ...]


@dataclass(frozen=True)
class KeySpec:
    """What one batch key holds.

    Args:
        shape: Shape in the notation of the module docstring.
        dtype: Element type.
        meaning: One line for documentation and error messages.
        written_by: Which part of the library writes it.
    """

    shape: str
    dtype: torch.dtype
    meaning: str
    written_by: str


BATCH_KEYS: dict[str, KeySpec] = {
    "prompt_tokens": KeySpec("[B, G, P]", torch.int64, "left-padded prompt ids", "collector"),
    "prompt_mask": KeySpec("[B, G, P]", torch.bool, "True where prompt_tokens is not padding", "collector"),
    "response_tokens": KeySpec("[B, G, T]", torch.int64, "ids exactly as sampled, stop token included", "collector"),
    "response_mask": KeySpec("[B, G, T]", torch.bool, "positions produced by the policy", "collector"),
    "loss_mask": KeySpec("[B, G, T]", torch.bool, "positions that count in the loss", "collector, OverlongFilter"),
    "rollout_log_prob": KeySpec("[B, G, T]", torch.float32, "log-prob reported by the sampler", "collector"),
    "old_log_prob": KeySpec("[B, G, T]", torch.float32, "log-prob before the first update on this batch", "recipe"),
    "ref_log_prob": KeySpec("[B, G, T]", torch.float32, "log-prob under the frozen reference policy", "recipe"),
    "log_prob": KeySpec("[B, G, T]", torch.float32, "log-prob under the policy being trained", "recipe"),
    "entropy": KeySpec("[B, G, T]", torch.float32, "entropy of the policy's next-token distribution", "recipe"),
    "group_num_tokens": KeySpec("[B, G]", torch.int64, "loss_mask summed over the whole group", "recipe"),
    "value": KeySpec("[B, G, T]", torch.float32, "value head output", "recipe"),
    "response_length": KeySpec("[B, G]", torch.int64, "response_mask summed, in tokens", "collector"),
    "truncated": KeySpec("[B, G]", torch.bool, "finish reason was the length limit", "collector"),
    "policy_version": KeySpec("[B, G]", torch.int64, "optimizer steps behind the sampling weights", "collector"),
    "prompt_id": KeySpec("[B, G]", torch.int64, "index of the prompt in the data set", "collector"),
    "group_id": KeySpec("[B, G]", torch.int64, "unique per draw of a prompt", "collector"),
    "sample_id": KeySpec("[B, G]", torch.int64, "index of the response in its group", "collector"),
    "accuracy": KeySpec("[B, G]", torch.float32, "correctness before any shaping; filters read this", "rewards"),
    "reward": KeySpec("[B, G]", torch.float32, "shaped outcome reward; advantages read this", "rewards"),
    "rewards": KeySpec("[B, G]", torch.float32, "nested: each component before weighting", "rewards"),
    "step_reward": KeySpec("[B, G, T]", torch.float32, "process reward at the last token of a step", "rewards"),
    "advantage": KeySpec("[B, G] or [B, G, T]", torch.float32, "detached advantage", "advantages"),
}
