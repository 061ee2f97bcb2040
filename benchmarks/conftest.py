"""What every benchmark shares: the device, honest timing on it, and the peak of its memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def timed(benchmark: Any, device: torch.device) -> Callable[..., Any]:
    """``timed(fn, *args)`` measures ``fn``, waits for the GPU inside the measured call and notes peak memory."""

    def measure(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            result = function(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return result

        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        result = benchmark(call)
        if device.type == "cuda":
            benchmark.extra_info["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
        else:
            # Of the whole process so far: comparable between runs of one benchmark alone.
            benchmark.extra_info["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
        benchmark.extra_info["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        benchmark.extra_info["threads"] = torch.get_num_threads()
        return result

    return measure
