"""The parts that walk over a softmax in tiles."""

from __future__ import annotations

import math

import pytest
import torch

from dapo_components.functional.softmax_tiles import (
    RowGradient,
    Scratch,
    SoftmaxStatistics,
    active_rows,
    compute_dtype,
    row_chunks,
    row_slices,
    tile_elements,
)

INF = float("inf")
ALL = slice(0, 2)


def values(x):
    """Numbers of a tensor that must be one."""
    assert isinstance(x, torch.Tensor)
    return x.tolist()


def scratch():
    return Scratch(16, dtype=torch.float64, device=torch.device("cpu"))


def absorbed(logits, tokens, widths, *, with_entropy=True):
    """Statistics of ``logits`` that arrive in tiles of the given widths."""
    statistics = SoftmaxStatistics(tokens, dtype=torch.float64, with_entropy=with_entropy)
    start = 0
    for tile in logits.split(widths, dim=1):
        statistics.absorb(tile, ALL, start, scratch())
        start += tile.shape[1]
    return statistics


@pytest.mark.parametrize("widths", [[4], [1, 1, 1, 1], [3, 1], [1, 3]])
def test_statistics_do_not_depend_on_the_tiles(widths):
    # exp: 1, 4, 2, 1 of 8 in all (the peak comes second), and 2, 1, 1, 4 (the peak comes last).
    logits = torch.tensor([[1.0, 4.0, 2.0, 1.0], [2.0, 1.0, 1.0, 4.0]], dtype=torch.float64).log() + 100
    statistics = absorbed(logits, torch.tensor([2, 3]), widths)
    assert statistics.peak.tolist() == [logits[0, 1].item(), logits[1, 3].item()]
    assert statistics.total.tolist() == pytest.approx([2.0, 2.0], rel=1e-13)
    assert statistics.log_prob().tolist() == pytest.approx([math.log(2 / 8), math.log(4 / 8)], rel=1e-13)
    # -(2 * 1/8 log 1/8 + 1/4 log 1/4 + 1/2 log 1/2) = 7/4 log 2 for both rows.
    assert values(statistics.entropy()) == pytest.approx([1.75 * math.log(2)] * 2, rel=1e-13)
    without = absorbed(logits, torch.tensor([2, 3]), widths, with_entropy=False)
    assert without.entropy() is None
    assert torch.equal(without.log_prob(), statistics.log_prob())


def test_a_forbidden_first_tile_and_a_far_lower_one_add_nothing():
    logits = torch.tensor([[-INF, -INF, 3.0, -INF], [-1e6, 1.0, 1.0, -INF]], dtype=torch.float64)
    statistics = absorbed(logits, torch.tensor([2, 1]), [2, 2])
    assert statistics.log_prob().tolist() == pytest.approx([0.0, -math.log(2)], abs=1e-15)
    assert values(statistics.entropy()) == pytest.approx([0.0, math.log(2)], abs=1e-15)


def test_the_largest_numbers_have_an_entropy():
    tokens = torch.tensor([0, 1])
    statistics = SoftmaxStatistics(tokens, dtype=torch.float32, with_entropy=True)
    tile = torch.tensor([[3e38, 0.0], [-3e38, -3e38]])
    statistics.absorb(tile, ALL, 0, Scratch(4, dtype=torch.float32, device=tile.device))
    assert statistics.log_prob().tolist() == pytest.approx([0.0, -math.log(2)])
    assert values(statistics.entropy()) == pytest.approx([0.0, math.log(2)])


def test_a_nan_stays_in_its_row():
    logits = torch.tensor([[0.0, float("nan")], [0.0, 0.0]], dtype=torch.float64)
    found = absorbed(logits, torch.tensor([0, 0]), [1, 1]).log_prob()
    assert found.isnan().tolist() == [True, False]
    assert found[1].item() == pytest.approx(-math.log(2))


@pytest.mark.parametrize("in_place", [False, True])
def test_gradient_tiles_by_hand(in_place):
    logits = torch.tensor([[1.0, 4.0, 2.0, 1.0], [2.0, 1.0, 1.0, 4.0]], dtype=torch.float64).log()
    share = logits.exp() / 8
    tokens = torch.tensor([2, 0])
    statistics = absorbed(logits, tokens, [4])
    grad_log_prob = torch.tensor([3.0, 0.0], dtype=torch.float64)
    grad_entropy = torch.tensor([0.0, 2.0], dtype=torch.float64)
    gradient = RowGradient(tokens, statistics.peak, statistics.total, statistics.entropy(), grad_log_prob, grad_entropy)
    found = []
    for start, tile in ((0, logits[:, :3].clone()), (3, logits[:, 3:].clone())):
        out = tile if in_place else torch.empty_like(tile)
        found.append(gradient.tile(tile, ALL, start, out, scratch()))
        assert found[-1] is out
    first = 3.0 * (torch.tensor([0.0, 0.0, 1.0, 0.0]) - share[0])
    second = -2.0 * share[1] * (share[1].log() + 1.75 * math.log(2))
    torch.testing.assert_close(torch.cat(found, dim=1), torch.stack([first, second]))


def test_rows_are_cut_into_slices_or_indices():
    assert list(row_slices(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(row_slices(0, 3)) == []
    assert list(row_chunks(4, None, 3)) == [slice(0, 3), slice(3, 4)]
    assert [values(chunk) for chunk in row_chunks(9, torch.tensor([1, 5, 8]), 2)] == [[1, 5], [8]]
    assert list(row_chunks(9, torch.tensor([], dtype=torch.int64), 2)) == []


def test_active_rows_have_a_gradient_and_are_selected():
    first, second = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, float("nan"), 0.0])
    assert values(active_rows((first, None), None)) == [1]
    assert values(active_rows((first, second), None)) == [1, 2]
    assert values(active_rows((first, second), torch.tensor([0, 2, 3]))) == [2]
    assert values(active_rows((first - first, None), None)) == []
    assert active_rows((None, torch.ones(4)), None) is None
    assert values(active_rows((None, torch.ones(4)), torch.tensor([0, 1, 2]))) == [0, 1, 2]


def test_scratch_is_made_once():
    buffers = scratch()
    first = buffers.shaped(0, torch.Size((2, 3)))
    assert first.shape == (2, 3)
    assert first.data_ptr() == buffers.shaped(0, torch.Size((4, 4))).data_ptr()
    assert first.data_ptr() != buffers.shaped(1, torch.Size((2, 3))).data_ptr()


def test_the_dtype_of_the_computation_is_float32_or_wider():
    half, single, double = (torch.empty(0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    assert compute_dtype(half) == compute_dtype(half, single) == torch.float32
    assert compute_dtype(half, double) == compute_dtype(double) == torch.float64


def test_a_gpu_gets_larger_tiles():
    assert tile_elements(torch.device("cpu")) * 4 == 8 * 2**20  # bytes: part of a shared cache
    assert tile_elements(torch.device("cuda")) > tile_elements(torch.device("cpu"))
