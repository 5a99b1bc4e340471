"""Which rank the beacon says, where the environment does not name it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from trainchaos import beacon
from trainchaos.harness.script.listen.progress import BeaconReader, GrowingFile

NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")
SPAWNED = """
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
from trainchaos import beacon

def work(rank, store):
    with beacon.busy("compile"):
        pass  # no process group yet
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    beacon.step(1, loss=0.5)
    with beacon.busy("evaluation"):
        pass
    dist.barrier()  # who leaves while the other still connects breaks that
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


class _Group(types.ModuleType):
    """Stands in for ``torch.distributed``."""

    def __init__(self, rank: int | None) -> None:
        super().__init__("torch.distributed")
        self._rank = rank

    def is_initialized(self) -> bool:
        return self._rank is not None

    def get_rank(self) -> int:
        assert self._rank is not None
        return self._rank


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "beacon.txt"
    path.touch()
    monkeypatch.setenv(beacon.VARIABLE, str(path))
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    return path


def said(path: Path) -> list[int | None]:
    """The ranks of all reports."""
    return [report.rank for report in BeaconReader(GrowingFile(path)).read()]


@pytest.mark.parametrize(
    ("environment", "group", "rank"),
    [
        ({}, None, None),
        ({"LOCAL_RANK": "1"}, None, 1),
        ({"LOCAL_RANK": "1"}, 5, 5),
        ({"RANK": "3", "LOCAL_RANK": "1"}, 5, 3),
        ({"SLURM_PROCID": "2", "LOCAL_RANK": "0"}, 5, 2),
        ({"OMPI_COMM_WORLD_RANK": "4"}, 5, 4),
        ({}, -1, None),  # not a member of the group
        ({"RANK": "x"}, None, None),
    ],
)
def test_the_rank_comes_from_the_first_that_knows_it(
    heard: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    group: int | None,
    rank: int | None,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch.distributed", _Group(group))
    beacon.step(1)
    with beacon.busy("evaluation"):
        pass
    assert said(heard) == [rank] * 3


def test_the_caller_knows_better(heard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    beacon.step(1, rank=6)
    with beacon.busy("evaluation", rank=6):
        pass
    beacon.step(2, rank="x")  # type: ignore[arg-type]
    assert said(heard) == [6, 6, 6]


@pytest.mark.parametrize("spoiled", ["half imported", "raises"])
def test_a_group_that_cannot_tell_does_no_harm(
    heard: Path, monkeypatch: pytest.MonkeyPatch, spoiled: str
) -> None:
    group: types.ModuleType = types.ModuleType("torch.distributed")
    if spoiled == "raises":
        group = _Group(0)
        monkeypatch.setattr(group, "get_rank", lambda: int("x"))
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setenv("LOCAL_RANK", "1")
    beacon.step(1)
    assert said(heard) == [1]


def test_torch_is_never_imported(heard: Path) -> None:
    code = (
        "import sys; from trainchaos.chaos import beacon; beacon.step(1); beacon.busy('x');"
        " assert not [name for name in sys.modules if name.startswith('torch')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert said(heard) == [None, None]


@pytest.mark.real
def test_processes_of_spawn_say_the_rank_of_their_group(heard: Path, tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")], env=env, check=True, timeout=120
    )
    reports = list(BeaconReader(GrowingFile(heard)).read())
    for pid in {report.pid for report in reports}:
        own = [report for report in reports if report.pid == pid]
        assert [report.rank for report in own[:2]] == [None, None]
        assert len({report.rank for report in own[2:]}) == 1
    assert sorted(r.rank for r in reports if r.step == 1 and r.rank is not None) == [0, 1]
