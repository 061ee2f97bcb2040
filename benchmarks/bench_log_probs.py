"""Log-probs of tokens, forward and backward: ours beside log_softmax and gather, with and without the entropy.

With pytest-benchmark at a small size: ``pytest benchmarks/bench_log_probs.py``. At the size of a real head, both sides
interleaved, with the ratio of their times and the peak of their memory beyond the inputs::

    THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.bench_log_probs

The loss is any weighted sum of the log-probs (plus a multiple of the entropies), so nothing can be fused into it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dapo_components.functional import linear_log_probs, token_log_probs

Size = tuple[int, int, int]  # tokens, hidden size, vocabulary
SMALL: Size = (512, 64, 8192)
ROUTES = ("logits", "hidden")
SIDES = ("plain", "ours", "plain with entropy", "ours with entropy", "ours, a quarter of the rows")


def prepare(route: str, side: str, size: Size, device: torch.device) -> Callable[[], None]:
    """Make inputs and return the measured call: forward, a loss, backward."""
    num_tokens, width, vocabulary = size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (num_tokens,), generator=generator).to(device)
    advantage = torch.randn(num_tokens, generator=generator).to(device)
    shapes = [(num_tokens, vocabulary)] if route == "logits" else [(num_tokens, width), (vocabulary, width)]
    inputs = [(torch.randn(shape, generator=generator) * 0.5).to(device).requires_grad_() for shape in shapes]
    with_entropy = "entropy" in side
    keep = torch.arange(num_tokens, device=device) % 4 == 0 if "quarter" in side else None
    score = score_plain if side.startswith("plain") else score_ours

    def run() -> None:
        for tensor in inputs:
            tensor.grad = None
        log_prob, entropy = score(inputs, tokens, keep, with_entropy=with_entropy)
        loss = -(log_prob * advantage).sum()
        if entropy is not None:
            loss = loss - 0.01 * entropy.sum()
        loss.backward()

    return run


def score_plain(
    inputs: list[Tensor], tokens: Tensor, keep: Tensor | None, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = inputs[0] if len(inputs) == 1 else inputs[0] @ inputs[1].T
    log_probs = logits.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1) if with_entropy else None
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def score_ours(
    inputs: list[Tensor], tokens: Tensor, keep: Tensor | None, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    if len(inputs) == 1:
        found = token_log_probs(inputs[0], tokens, mask=keep, with_entropy=with_entropy)
    else:
        found = linear_log_probs(inputs[0], inputs[1], tokens, mask=keep, with_entropy=with_entropy)
    return found if isinstance(found, tuple) else (found, None)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("route", ROUTES)
def test_log_probs(benchmark, timed, device, route, side):
    benchmark.group = f"log-probs from {route}, {' x '.join(map(str, SMALL))}"
    timed(prepare(route, side, SMALL, device))


def peak_mib(route: str, side: str, size: Size) -> float:
    """Memory beyond the inputs at the worst moment of one call; of a fresh process, which holds nothing in reserve."""
    if torch.cuda.is_available():
        run = prepare(route, side, size, torch.device("cuda"))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    prepare(route, side, (8, 8, 64), torch.device("cpu"))()  # libraries load their parts at first use
    run = prepare(route, side, size, torch.device("cpu"))
    before = resident_mib("VmRSS")
    run()
    return resident_mib("VmHWM") - before


def resident_mib(field: str) -> float:
    """A line of Linux's account of this process."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=3, default=(2048, 576, 49152), metavar=("TOKENS", "HIDDEN", "VOCAB"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--route", choices=ROUTES, action="append")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for route in arguments.route or ROUTES:
        compare(route, tuple(arguments.size), arguments.rounds, device)


def compare(route: str, size: Size, rounds: int, device: torch.device) -> None:
    """Run the sides in turn and print medians; the first round is left out, it fills caches."""
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    busy: dict[str, list[float]] = {side: [] for side in SIDES}
    loads = [os.getloadavg()[0]]
    for _ in range(rounds + 1):
        for side in SIDES:
            run = prepare(route, side, size, device)
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            wall[side].append(time.perf_counter() - start)
            busy[side].append(time.process_time() - cpu_start)
        loads.append(os.getloadavg()[0])
    print(
        f"from {route}, {' x '.join(map(str, size))}, float32, torch {torch.__version__}, {device.type}, "
        f"{torch.get_num_threads()} threads, THP_MEM_ALLOC_ENABLE={os.environ.get('THP_MEM_ALLOC_ENABLE')}, "
        f"load average {min(loads):.1f} to {max(loads):.1f}"
    )
    wall_plain, busy_plain = (statistics.median(times["plain"][1:]) for times in (wall, busy))
    for side in SIDES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            peak = fresh.submit(peak_mib, route, side, size).result()
        wall_median, busy_median = (statistics.median(times[side][1:]) for times in (wall, busy))
        print(
            f"  {side:28} {wall_median:6.2f} s {wall_median / wall_plain:5.2f} of plain | "
            f"processor time {busy_median:6.2f} s {busy_median / busy_plain:5.2f} | peak {peak:7.1f} MiB"
        )


if __name__ == "__main__":
    main()
