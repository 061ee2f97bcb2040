"""Losses that read a batch and return a scalar with measurements."""

from __future__ import annotations

from dapo_components.losses.output import PolicyLossOutput
from dapo_components.losses.policy import DAPOLoss

__all__ = ["DAPOLoss", "PolicyLossOutput"]
