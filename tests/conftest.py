"""Fixtures of more than one test file."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from trainchaos.harness.host import dns_check

# On a busy machine a moment may be long; and whoever changes nothing sees the same examples as the
# run before.
settings.register_profile(
    "all", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("sample", settings.get_profile("all"), max_examples=15)

os.environ["CHAOS_TAINTS"] = "/nonexistent/taints.yaml"
"""What whoever runs the tests has tainted on this machine is not to change them."""


DESCRIPTORS = 8192
"""A process of the tests plays thousands of ranks; a shell's usual limit is 1024."""


SAMPLE = 3
"""Members of a family, a test function with many parameters, that ``--sample`` leaves."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is played of all that is selected."""
    parser.addoption(
        "--sample", metavar="SEED", help="of each family of tests play a few members, drawn by SEED"
    )
    parser.addoption(
        "--part", default="1/1", metavar="I/N", help="of N equal parts play the I-th, and smokes"
    )
    parser.addoption(
        "--whole", default="", metavar="PATHS", help="play these, in quotes, whatever the part"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is in no sample and in no part. Tests of real processes come first: a long one
    that began last would be waited for alone.
    """
    families = defaultdict[str, list[pytest.Item]](list)
    part, _, parts = config.getoption("--part").partition("/")
    whole = tuple(config.getoption("--whole").split())
    for item in items:
        if (
            zlib.crc32(item.nodeid.encode()) % int(parts) == int(part) - 1
            or item.get_closest_marker("smoke")
            or item.nodeid.startswith(whole)
        ):
            families[item.nodeid.partition("[")[0]].append(item)
    played: list[pytest.Item] = []
    for name, members in families.items():
        played += _sampled(name, members, config.getoption("--sample"))
    played.sort(key=lambda item: item.get_closest_marker("real") is None)
    config.hook.pytest_deselected(items=list(set(items).difference(played)))
    items[:] = played


def _sampled(name: str, members: list[pytest.Item], seed: str | None) -> list[pytest.Item]:
    """Those of a family that are played: of members in ``make test`` as many as its mark says."""
    mark = members[0].get_closest_marker("sample")
    count = mark.args[0] if mark else SAMPLE
    short = [one for one in members if one.get_closest_marker("long") is None]
    if seed is None or len(short) <= count:
        return members
    drawn = set(random.Random(f"{seed} {name}").sample(short, count))
    return [one for one in members if one in drawn]


def pytest_configure(config: pytest.Config) -> None:
    """Raise the limit of open files, as far as this user may; choose how many examples there are of
    each property.
    """
    settings.load_profile("all" if config.getoption("--sample") is None else "sample")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


ROOM_MIB = 512
"""Logs, checkpoints and pages of the tests, as far as they are there at once."""


def pytest_sessionstart() -> None:
    """One word beforehand in place of a thousand tests that fail without saying why."""
    free_mib = shutil.disk_usage(tempfile.gettempdir()).free >> 20
    if free_mib < ROOM_MIB:
        pytest.exit(
            f"{tempfile.gettempdir()} has {free_mib} MiB left, tests need {ROOM_MIB}: set TMPDIR"
            " to a directory with more; no test was played",
            returncode=4,
        )


def pytest_collection_finish() -> None:
    """One thread of torch a worker: threads of several workers that spin for each other on few
    cores take ten times as long. And what was imported stays: the collector need not walk it again
    and again.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # a tenth of the time of simulated jobs otherwise


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
