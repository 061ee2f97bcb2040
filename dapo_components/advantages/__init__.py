"""Advantage estimators that read rewards from a batch and write advantages to it."""

from __future__ import annotations

from dapo_components.advantages.group import GroupNormalizedAdvantage, LeaveOneOutAdvantage

__all__ = ["GroupNormalizedAdvantage", "LeaveOneOutAdvantage"]
