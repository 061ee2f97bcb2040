"""Fixtures of the whole suite, and the rule that a GPU test needs a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from tests.source_sizes import over_soft_limits

# Nothing in the suite may depend on a model hub; a test that asks one by mistake fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Forking after the tokenizers library has started its threads prints a warning in every child.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def generator() -> torch.Generator:
    """Random numbers that are the same in every run."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which files and functions are longer than they should be; the hard limits are tests."""
    if any("test_architecture" in report.nodeid for report in terminalreporter.getreports("passed")):
        for name, count in over_soft_limits().items():
            terminalreporter.write_line(f"longer than the soft limit: {name} ({count} lines)")
