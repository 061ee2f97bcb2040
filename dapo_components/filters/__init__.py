"""Which groups and which responses take part in an update."""

from __future__ import annotations

from dapo_components.filters.base import FilterChain, FilterDecision, GroupFilter
from dapo_components.filters.groups import AccuracyBoundsFilter, NonZeroStdFilter
from dapo_components.filters.overlong import OverlongFilter

__all__ = [
    "AccuracyBoundsFilter",
    "FilterChain",
    "FilterDecision",
    "GroupFilter",
    "NonZeroStdFilter",
    "OverlongFilter",
]
