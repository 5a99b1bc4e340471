"""Who is which rank: in replica groups that each count from 0, and the one that trains behind a
launcher.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.script.processes.test_script_processes import start, started
from tests.support.running import PYTHON, until
from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.script.listen.progress import GrowingFile, ProgressReport, RegexReader
from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.command import Command
from trainchaos.harness.script.processes.finding import FoundRank, RankFinder, find_named
from trainchaos.harness.script.processes.ranks import Ranks

__all__ = ["started"]  # a fixture

GUARD, LAUNCHER = 1, 2


def spec_of(ranks: int, **more: Any) -> WorkloadSpec:
    return WorkloadSpec.model_validate({"command": ["x"], "ranks": ranks, "steps": 10, **more})


def found_in(
    monkeypatch: pytest.MonkeyPatch, *env: Mapping[str, str], **more: Any
) -> dict[int, FoundRank]:
    """Ranks among processes 10, 11 ... below a launcher, each with an environment."""
    parents = more.pop("parents", {})
    rows = {
        LAUNCHER: tree.ProcessRow(pid=LAUNCHER, parent=GUARD, started=1, state="S", name="launch")
    }
    rows |= {
        10 + n: tree.ProcessRow(
            pid=10 + n,
            parent=parents.get(10 + n, LAUNCHER),
            started=2 + n,
            state="S",
            name="python",
        )
        for n, _ in enumerate(env)
    }
    monkeypatch.setattr(tree, "below", lambda root: rows)
    monkeypatch.setattr(tree, "environment", lambda pid: env[pid - 10] if pid >= 10 else {})
    monkeypatch.setattr(tree, "is_wrapper", lambda row: False)
    return find_named(GUARD, more.pop("hints", {}), **more)


def replica(group: str, rank: int = 0, world: int = 1) -> dict[str, str]:
    return {"GROUP": group, "RANK": str(rank), "WORLD_SIZE": str(world)}


@pytest.mark.parametrize("name", ["{}", "replica_{}", "r-{}"])
def test_all_replica_groups_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    envs = [replica(name.format(n)) for n in range(4)]
    assert len(found_in(monkeypatch, *envs)) == 1, "without it they are all rank 0"
    found = found_in(monkeypatch, *envs, group="GROUP")
    assert {rank: one.pid for rank, one in found.items()} == {0: 10, 1: 11, 2: 12, 3: 13}
    assert {one.world for one in found.values()} == {None}, "how many there are in all, nobody says"


def test_groups_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = [replica(str(group), rank, 2) for group in (1, 0) for rank in (0, 1)]
    found = found_in(monkeypatch, *envs, group="GROUP")
    assert {rank: one.pid for rank, one in found.items()} == {2: 10, 3: 11, 0: 12, 1: 13}


def test_a_replica_without_a_rank_is_its_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in(
        monkeypatch, {"GROUP": "0"}, {"GROUP": "1"}, {"RANK": "0"}, {"GROUP": "x"}, group="GROUP"
    )
    assert {rank: one.pid for rank, one in found.items()} == {0: 10, 1: 11}


def test_the_launcher_of_a_group_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launchers: list[dict[str, str]] = [{"GROUP": "0"}, {"GROUP": "1"}]
    early = found_in(monkeypatch, *launchers, group="GROUP")
    assert not any(one.sure for one in early.values()), "they may be launchers"
    roll = RankFinder(spec_of(4, group="GROUP"), tmp_path / "output.log")
    command: Any = SimpleNamespace(guard_pid=GUARD, pid=LAUNCHER)
    ranks = [replica(str(group), rank, 2) for group in (0, 1) for rank in (0, 1)]
    for envs, due in (
        ((*launchers, *ranks), {0: 12, 1: 13, 2: 14, 3: 15}),
        ((*launchers, {}, {}, *ranks[2:]), {2: 14, 3: 15}),  # those of a group have ended
    ):
        parents = {12: 10, 13: 10, 14: 11, 15: 11}
        found_in(monkeypatch, *envs, parents=parents, group="GROUP")
        found = roll.find(command, {}, spoken=True)
        assert {rank: one.pid for rank, one in found.items()} == due


def test_a_helper_that_has_the_rank_of_its_trainer_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree, "is_helper", lambda pid: pid == 11)
    found = found_in(monkeypatch, {"GROUP": "0"}, replica("0"), parents={11: 10}, group="GROUP")
    assert {rank: one.pid for rank, one in found.items()} == {0: 10}


def test_who_says_rank_0_in_its_group_is_the_rank_of_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envs = [replica(str(n)) for n in range(3)]
    found = found_in(monkeypatch, *envs, group="GROUP", hints={10: 0, 11: 0, 12: 0, 99: 0})
    assert {rank: one.pid for rank, one in found.items()} == {0: 10, 1: 11, 2: 12}


def test_reports_are_told_apart_by_their_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    roll = RankFinder(spec_of(4, group="GROUP"), tmp_path / "output.log")
    command: Any = SimpleNamespace(guard_pid=GUARD, pid=LAUNCHER)
    found_in(monkeypatch, *[replica(str(g), r, 2) for g in (0, 1) for r in (0, 1)])
    roll.find(command, {}, spoken=True)
    said = [roll.whose(ProgressReport(step=1, rank=0, pid=pid)).rank for pid in (10, 12, 99)]
    assert said == [0, 2, None]
    path = tmp_path / "output.log"
    path.write_text("[replica_1] rank 1: step 7\nrank 1: step 8\n")
    read = RegexReader(
        GrowingFile(path),
        RegexProgress(regex=r"(?:\[(?P<group>\w+)\] )?rank (?P<rank>\d): step (?P<step>\d)"),
        steps=100,
    ).read()
    assert [roll.whose(one).rank for one in read] == [3, None]
    plain = RankFinder(spec_of(4), path)
    assert plain.whose(ProgressReport(step=1, rank=1, pid=10)).rank == 1


def test_who_speaks_before_it_knows_its_rank_is_known_by_its_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    roll = RankFinder(spec_of(2), tmp_path / "output.log")
    command: Any = SimpleNamespace(guard_pid=GUARD, pid=LAUNCHER)
    found_in(monkeypatch, {}, {})
    roll.find(command, {10: 1, 11: 0}, spoken=True)
    early = [ProgressReport(step=0, pid=pid, busy_s=60.0, what="compile") for pid in (10, 11, 99)]
    assert [roll.whose(one).rank for one in early] == [1, 0, None]


# ---- the one that trains

HEAD = "import os, subprocess, sys, threading, time\n"
# who trains has used more of a processor than who has only imported Python's library
STEPS = (
    "while time.process_time() < 0.3: pass\n"
    "print('step 1 of many, and what else it says', flush=True)\n"
)
TRAINER = HEAD + STEPS + "threading.Event().wait(300)\n"
LAUNCHERS = {
    "waits": "subprocess.run([sys.executable, 'train.py'])\n",
    "passes on": (
        "p = subprocess.Popen([sys.executable, 'train.py'], stdout=subprocess.PIPE, text=True)\n"
        "for line in p.stdout: print(line, end='', flush=True)\n"
    ),
}


def launch(started: list[Command], tmp_path: Path, program: str) -> Command:
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "launch.py").write_text(HEAD + program)
    return start(started, tmp_path, f"exec {PYTHON} launch.py", PYTHONUNBUFFERED="1")


def printed(tmp_path: Path, lines: int = 1) -> bool:
    return (tmp_path / "out").exists() and (tmp_path / "out").read_text().count("step 1 ") >= lines


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@pytest.mark.real
@pytest.mark.parametrize("how", ["waits", "passes on"])
def test_sigterm_goes_to_the_trainer_and_not_to_its_launcher(
    started: list[Command], tmp_path: Path, how: str
) -> None:
    command = launch(started, tmp_path, LAUNCHERS[how] + "threading.Event().wait(300)\n")
    until(lambda: printed(tmp_path))
    roll = RankFinder(spec_of(1), tmp_path / "out")
    found = until(
        lambda: (f := roll.find(command, {}, spoken=True)) and "train.py" in cmdline(f[0].pid) and f
    )[0]
    ranks = Ranks()
    ranks.hold({0: found})
    ranks.signal("w0", signal.SIGTERM)
    (gone,) = until(lambda: ranks.wait(0.1))
    assert gone.pid == found.pid and tree.process(command.pid) is not None
    ranks.close()


@pytest.mark.real
def test_who_is_started_instead_is_found_and_the_launcher_never(
    started: list[Command], tmp_path: Path
) -> None:
    command = launch(started, tmp_path, 2 * LAUNCHERS["waits"] + "threading.Event().wait(300)\n")
    until(lambda: printed(tmp_path))
    roll = RankFinder(spec_of(1), tmp_path / "out")
    first = roll.find(command, {}, spoken=True)[0].pid
    assert "train.py" in cmdline(first) and roll.find(command, {}, spoken=True)[0].pid == first
    os.kill(first, signal.SIGKILL)
    second = until(lambda: (f := roll.find(command, {}, spoken=False)) and f[0].pid != first and f)[
        0
    ].pid
    assert "train.py" in cmdline(second)
    until(lambda: printed(tmp_path, 2))
    roll.find(command, {}, spoken=True)
    os.kill(second, signal.SIGKILL)
    until(lambda: second not in tree.below(command.guard_pid))
    assert roll.find(command, {}, spoken=False) == {}


@pytest.mark.real
def test_a_trainer_is_not_taken_for_the_launcher_of_its_helpers(
    started: list[Command], tmp_path: Path
) -> None:
    workers = "os.fork() or threading.Event().wait(300)\n"
    helper = "subprocess.Popen(['sleep', '300'], stdout=subprocess.PIPE)\n"
    command = launch(started, tmp_path, helper + STEPS + workers + "threading.Event().wait(300)\n")
    until(lambda: printed(tmp_path) and len(tree.below(command.guard_pid)) == 3)
    found = RankFinder(spec_of(1), tmp_path / "out").find(command, {}, spoken=True)
    assert found[0].pid == command.pid
