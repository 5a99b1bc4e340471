"""Fixtures of more than one test file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PAIRED = {
    "test_common_job", "test_compare_real", "test_elastic", "test_heal_real", "test_join", "test_loader",
    "test_nodes_agent", "test_reduce", "test_run", "test_run_nodes", "test_script", "test_script_points",
    "test_script_processes", "test_script_wrapped", "test_sharded", "test_stacks_dlrover_ray",
    "test_stacks_torchft_nvrx", "test_undo", "test_versions", "test_zygote",
}  # fmt: skip
"""Files whose tests with real processes measure nothing: two at a time."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, so that ``make test`` can choose."""
    for item in items:
        if Path(item.path).stem in PAIRED and item.get_closest_marker("real"):
            item.add_marker("paired")


@pytest.fixture
def memory() -> Iterator[Path]:
    """An empty directory, in memory if possible: simulated ranks flush real checkpoints to it."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as path:
        yield Path(path)
