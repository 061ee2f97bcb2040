"""The number format of losses."""

from __future__ import annotations

import pytest
import torch

from dapo_components.functional.precision import at_least_float32
from tests.oracles_policy import grad_of


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.int64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_dtype(dtype, expected):
    x = torch.tensor([2, 3], dtype=dtype)
    out = at_least_float32(x)
    assert out.dtype == expected
    assert out.tolist() == [2.0, 3.0]
    assert (out is x) is (dtype == expected)


def test_gradient_flows_back_in_the_input_format():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    (3 * at_least_float32(x)).sum().backward()
    assert grad_of(x).dtype == torch.bfloat16
    assert grad_of(x).tolist() == [3.0, 3.0]
