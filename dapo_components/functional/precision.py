"""The number format in which losses are computed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["at_least_float32"]


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` as float32 unless it is float32 or float64 already.

    A ratio of two log-probs needs more than the 8 bits of bfloat16: near -5 its neighbours are 0.03 apart, a sixth of
    a clip bound.

    Args:
        x: Values, any shape and dtype.

    Returns:
        ``x`` itself, or a float32 copy through which gradients flow.

    Example:
        >>> at_least_float32(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
