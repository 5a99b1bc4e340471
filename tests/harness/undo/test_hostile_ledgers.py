"""Ledgers that nobody of ours wrote. They say what is to be killed, unmounted and removed, and are
not believed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.harness.host import processes
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.run import heal
from trainchaos.harness.undo import live
from trainchaos.harness.undo.base import Undo
from trainchaos.harness.undo.ledger import Ledger, read_open
from trainchaos.harness.undo.records import (
    KillProcess,
    KillSession,
    RemoveCgroup,
    RemoveTree,
    Unmount,
)
from trainchaos.harness.undo.slurm import CancelSteps


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """One whose harness is gone, with a directory of its own to be removed, and a file
    beside it.
    """
    found = RunDirectory(tmp_path / "beside" / "run")
    (found.root / "made").mkdir(parents=True)
    gone = live.HarnessProcess.me("0123456789").model_copy(
        update={"pid": 2**22 - 1, "start_time": 1}
    )
    (found.root / live.FILE).write_text(json.dumps(gone.model_dump()))
    Ledger(found.ledger).will(RemoveTree(path=found.root / "made", inside=found.root))
    outside(found).write_text("precious")
    return found


def outside(run: RunDirectory) -> Path:
    """The file that is not the run's."""
    return run.root.parent / "outside"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process, which leads a session."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait(timeout=120)


def test_heal_kills_nobody_by_a_number_alone(
    run: RunDirectory, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    pid, started = sleeper.pid, processes.start_time(sleeper.pid)
    records: list[Undo] = [
        KillProcess(pid=pid, start_time=started + 1),
        KillProcess(pid=pid, start_time=started, boot_id="another"),
        KillSession(sid=pid, start_time=started + 1, marker="0123456789"),
        KillSession(sid=pid, start_time=started, boot_id="another"),
    ]
    for record in records:
        Ledger(run.ledger).will(record)
    assert invoke(["heal", str(run.root)]) == 0
    lines = [
        {
            "will": "x",
            "undo": KillProcess(pid=pid, start_time=started).model_dump(exclude={"boot_id"}),
        }
    ]
    lines += [
        {
            "will": {"y": 1},
            "undo": {"do": "kill-process", "pid": 2**40, "start_time": 1, "boot_id": "b"},
        }
    ]
    with run.ledger.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    assert invoke(["heal", str(run.root)]) == 5
    assert capsys.readouterr().out.count("is not known to this version of chaos") == 2
    assert sleeper.poll() is None


def test_members_of_a_session_whose_leader_is_gone_are_nobodys(
    sleeper: subprocess.Popen[bytes],
) -> None:
    """A record without a start time would take a leader that is gone for its own."""
    gone = 2**22 - 1
    assert not processes.start_time(gone)
    record = KillSession(sid=gone, start_time=0)
    assert record._members() == [] and record.undo().ok


def test_heal_removes_and_unmounts_nothing_outside_the_run(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.root / "way").symlink_to(run.root.parent)
    for record in (
        RemoveTree(path=outside(run), inside=run.root.parent),
        RemoveTree(path=run.root / "way" / "outside", inside=run.root / "way"),
        RemoveTree(path=outside(run), inside=run.root),
        RemoveTree(path=Path("no-such-file"), inside=Path(".")),
        RemoveTree(path=run.root.parent / "a\0b", inside=run.root.parent),
        # harmless if it were believed
        Unmount(path=run.root.parent / "mount", source="nothing-of-the-kind"),
    ):
        Ledger(run.ledger).will(record)
    assert invoke(["heal", str(run.root)]) == 5
    assert outside(run).read_text() == "precious"
    assert capsys.readouterr().out.count("left alone") == 6
    assert len(read_open(run.ledger)) == 6 and not (run.root / "made").exists()


def test_a_directory_that_looks_like_a_control_group_is_none(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    group = tmp_path / "cgroup" / "chaos-x"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text(f"{sleeper.pid}\n")
    outcome = RemoveCgroup(path=group).undo()
    assert not outcome.ok and "left alone" in outcome.text
    assert sleeper.poll() is None and group.is_dir()


def test_a_ledger_that_cannot_be_read_leaves_everything_and_is_unsafe(run: RunDirectory) -> None:
    run.ledger.unlink()
    run.ledger.symlink_to(outside(run))
    found = heal.heal(run)
    assert found.state == "left" and "is a symbolic link: nothing was undone" in " ".join(
        found.lines
    )
    assert (run.root / "made").exists() and (run.root / live.FILE).exists()
    assert heal.exit_code(heal.heal_named(run.root)) == 5
    assert outside(run).read_text() == "precious"


def test_a_harness_that_holds_its_file_is_alive_whatever_stands_in_it(run: RunDirectory) -> None:
    (run.root / live.FILE).unlink()
    with live.holding(run):
        (run.root / live.FILE).write_text("{")
        assert heal.heal(run).state == "alive"
        assert (run.root / "made").exists()


def test_a_configuration_that_came_with_the_run_is_given_to_no_program(run: RunDirectory) -> None:
    conf = run.root / "slurm.conf"
    conf.write_text("PluginDir=/tmp\n")
    (run.root.parent / "way").symlink_to(conf)
    for named in (conf, run.root.parent / "way"):
        record = CancelSteps(job="1", names="chaos-0123456789abcdef-", conf=str(named))
        outcome = record.undo_of(run.root)
        assert (
            not outcome.ok
            and "the configuration of Slurm is in the run's own directory" in outcome.text
        )


def test_more_than_can_be_open_is_no_ledger(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainchaos.harness.undo.ledger.MOST_OPEN", 0)
    assert "nothing was undone" in heal.heal(run).lines[-1] and (run.root / "made").exists()
