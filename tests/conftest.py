"""Fixtures of more than one test file."""

from __future__ import annotations

import gc
import os
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from trainchaos.harness.host import dns_check

# On a busy machine a moment may be long; and whoever changes nothing sees the same examples as the
# run before.
settings.register_profile(
    "anywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("anywhere")

os.environ["CHAOS_TAINTS"] = "/nonexistent/taints.yaml"
"""What whoever runs the tests has tainted on this machine is not to change them."""


DESCRIPTORS = 8192
"""A process of the tests plays thousands of ranks; a shell's usual limit is 1024."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--part``."""
    parser.addoption(
        "--part", default="1/1", metavar="I/N", help="of N equal parts of the tests play the I-th"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as long what is not in the sample of its family (``sample(n)``: its first n members).
    Leave out the tests of other parts: by their names, so that a test stays in its part.
    """
    members = Counter[str]()
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is None or item.get_closest_marker("long") or item.get_closest_marker("soak"):
            continue
        family = item.nodeid.partition("[")[0]
        members[family] += 1
        if members[family] > sample.args[0]:
            item.add_marker("long")
    part, _, parts = config.getoption("--part").partition("/")
    others = [one for one in items if crc32(one.nodeid.encode()) % int(parts) != int(part) - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [one for one in items if one not in left_out]


def pytest_configure() -> None:
    """Raise the limit of open files, as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def pytest_collection_finish() -> None:
    """One thread of torch a worker: threads of several workers that spin for each other on few
    cores take ten times as long. And what was imported stays: the collector need not walk it again
    and again.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture
def names_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name server answers at once: a plan of a comparison asks it for seconds where it does
    not.
    """
    monkeypatch.setattr(dns_check, "slowest_lookup_s", lambda: 0.0)


@pytest.fixture
def memory() -> Iterator[Path]:
    """An empty directory, in memory if possible: simulated ranks flush real checkpoints to it."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def no_default_group() -> Iterator[None]:
    """A job leaves torch's default group to the script that it ran in: here, to the next test."""
    yield
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()
