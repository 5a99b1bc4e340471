"""The processes of a command: which is which rank, how it ended, and that all of them go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.running import LIMIT_S, until
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.host import processes
from trainchaos.harness.script.listen.progress import rank_number
from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.command import Command
from trainchaos.harness.script.processes.environment import MARK, RANK_NAMES
from trainchaos.harness.script.processes.finding import FoundRank, RankFinder, find_named
from trainchaos.harness.script.processes.ranks import ExitedRank, Ranks
from trainchaos.recovery.process.processes import become_subreaper

pytestmark = pytest.mark.real

IDLE = f'"{sys.executable}" -c "import threading; threading.Event().wait(300)"'
MARKED = f"test-of-commands-{os.getpid()}"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.close(MARKED)


def start(started: list[Command], tmp_path: Path, shell: str, **env: str) -> Command:
    become_subreaper()
    clean = {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
    command = Command.start(
        ["bash", "-c", shell],
        directory=tmp_path,
        env={**clean, MARK: MARKED, **env},
        output=tmp_path / "out",
    )
    started.append(command)
    return command


def finder(ranks: int) -> RankFinder:
    spec = WorkloadSpec.model_validate({"command": ["x"], "ranks": ranks, "steps": 10})
    return RankFinder(spec, Path("/nowhere"))


def find(
    command: Command, count: int, *, hints: dict[int, int] | None = None
) -> dict[int, FoundRank]:
    """The ranks, once there are so many and as many processes as will be."""
    found: dict[int, FoundRank] = {}

    def all_there() -> bool:
        found.clear()
        found.update(find_named(command.guard_pid, hints or {}))
        rows = [tree.process(one.pid) for one in found.values()]
        return len(found) == count and all("python" in row.name for row in rows if row)

    until(all_there)
    return found


def ended(command: Command) -> bool:
    command.look()
    return command.ended is not None


def await_exit(ranks: Ranks) -> ExitedRank:
    (gone,) = until(lambda: ranks.wait(0.1))
    assert isinstance(gone, ExitedRank)
    return gone


def test_a_rank_is_the_topmost_process_that_has_it(started: list[Command], tmp_path: Path) -> None:
    # what a rank forks, such as a data loader's workers, inherits its environment and is younger
    loader = "import os, threading; os.fork(); threading.Event().wait(300)"
    command = start(
        started, tmp_path, f'RANK=1 WORLD_SIZE=2 "{sys.executable}" -c "{loader}" & wait'
    )
    until(lambda: len(tree.below(command.guard_pid)) >= 3)
    (found,) = find(command, 1).values()
    rows = tree.below(command.guard_pid)
    assert (found.rank, found.world) == (1, 2)
    assert rows[found.pid].parent == command.pid
    assert any(row.parent == found.pid for row in rows.values())


def test_behind_a_wrapper_stands_the_rank(started: list[Command], tmp_path: Path) -> None:
    command = start(started, tmp_path, f"RANK=0 timeout 300 nice {IDLE} & wait")
    (found,) = find(command, 1).values()
    row = tree.process(found.pid)
    assert row is not None and row.name.startswith("python")


def test_all_behind_a_wrapper_is_hit(started: list[Command], tmp_path: Path) -> None:
    # the shell, the process that trains and its child, and what sees to the output: never the shell
    # alone
    child = "import os, threading; os.fork(); threading.Event().wait(300)"
    inner = f"'{sys.executable}' -c '{child}' | cat"
    command = start(started, tmp_path, f'RANK=0 bash -c "{inner}" & wait')
    until(lambda: len(tree.below(command.guard_pid)) >= 5)
    ranks = Ranks()
    members, _ = ranks.hold(find(command, 1))
    trainers = [
        pid for pid, row in tree.below(command.guard_pid).items() if row.name.startswith("python")
    ]
    assert len(trainers) == 2
    ranks.signal(members[0], signal.SIGSTOP)
    until(lambda: all(row and row.state == "T" for row in map(tree.process, trainers)))
    assert ranks.state(members[0]) == "T"
    ranks.signal(members[0], signal.SIGKILL)
    until(lambda: not set(trainers) & set(tree.below(command.guard_pid)))
    assert await_exit(ranks).signal == signal.SIGKILL
    ranks.close()


def test_a_daemon_left_behind_is_not_the_rank(started: list[Command], tmp_path: Path) -> None:
    command = start(started, tmp_path, f"setsid {IDLE} & sleep 0.1; exit 0")
    until(lambda: ended(command))
    assert tree.below(command.guard_pid)
    assert finder(1).find(command, {}, spoken=True) == {}


ITSELF = """
import os, subprocess, sys, threading
if "LOCAL_RANK" not in os.environ:
    for n in (1, 2):
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"LOCAL_RANK": str(n)})
threading.Event().wait(300)
"""


def test_who_starts_itself_again_for_the_others_is_rank_0(
    started: list[Command], tmp_path: Path
) -> None:
    """As Lightning's launcher does; and a kill of rank 0 is none of the ranks below it."""
    (tmp_path / "itself.py").write_text(ITSELF)
    command = start(started, tmp_path, f'exec "{sys.executable}" -u itself.py')
    found = find(command, 3)
    assert found[0].pid == command.pid
    ranks = Ranks()
    members, _ = ranks.hold(found)
    ranks.signal(members[0], signal.SIGKILL)
    assert await_exit(ranks).name == members[0]
    assert sorted(ranks.living()) == sorted([members[1], members[2]])
    ranks.close()


def test_a_launcher_whose_rank_0_is_gone_is_not_rank_0(
    started: list[Command], tmp_path: Path
) -> None:
    command = start(started, tmp_path, f"RANK=1 {IDLE} & wait")
    assert list(find(command, 1)) == [1]


MEETS = """
import os, socket, sys, threading, time
server = socket.create_server(("127.0.0.1", 0))
count = int(sys.argv[1])
for n in range(count):
    if os.fork() == 0:
        talk = socket.create_connection(server.getsockname()) if sys.argv[2] == "meet" else None
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        threading.Event().wait(300)
talks = [server.accept() for _ in range(count)] if sys.argv[2] == "meet" else []
threading.Event().wait(300)
"""


def test_ranks_that_nothing_names_were_started_alike_and_meet(
    started: list[Command], tmp_path: Path
) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    command = start(started, tmp_path, f'exec "{sys.executable}" meets.py 3 meet')
    ranks = finder(3)

    def look(count: int = 3, *, settled: bool = True) -> dict[int, FoundRank]:
        return ranks.alike(tree.below(command.guard_pid), count, settled=settled)

    assert look(settled=False) == {}, "who has worked most is not known before the first step"
    found = until(lambda: (now := look()) and len(now) == 3 and now)
    assert [found[n].pid for n in range(3)] == sorted(one.pid for one in found.values())
    assert command.pid not in [one.pid for one in found.values()]
    os.kill(found[1].pid, signal.SIGKILL)
    until(lambda: len(look()) < 3)
    assert look() == {0: found[0], 2: found[2]}, "the others keep their numbers"


def test_workers_that_meet_nobody_are_no_ranks(started: list[Command], tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    command = start(started, tmp_path, f'exec "{sys.executable}" meets.py 2 alone')
    until(lambda: len(tree.below(command.guard_pid)) >= 3)
    signal.sigtimedwait([], 0.3)
    assert finder(2).alike(tree.below(command.guard_pid), 2, settled=True) == {}


def test_a_rank_that_says_so_itself(started: list[Command], tmp_path: Path) -> None:
    command = start(started, tmp_path, f"{IDLE} & echo $! > pid; wait")
    until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text().strip()))
    pid = int((tmp_path / "pid").read_text())
    # only what is below the command
    assert find(command, 1, hints={pid: 3, os.getpid(): 4})[3].pid == pid


@pytest.mark.parametrize("value", ["-1", "1.0", "x", "99999999", "", "٣"])
def test_a_rank_that_is_no_number(value: str) -> None:
    assert rank_number(value) is None


def test_how_somebody_elses_child_ended(started: list[Command], tmp_path: Path) -> None:
    shell = f"RANK=0 {IDLE} & RANK=1 {IDLE} & wait"
    ranks = Ranks()
    members, new = ranks.hold(find(start(started, tmp_path, shell), 2))
    assert sorted(members) == [0, 1] and len(new) == 2
    ranks.signal(members[1], signal.SIGSTOP)
    until(lambda: ranks.state(members[1]) == "T")
    ranks.signal(members[1], signal.SIGKILL)
    gone = await_exit(ranks)
    assert (gone.name, gone.exit_code, gone.signal) == (members[1], None, signal.SIGKILL)
    assert ranks.state(members[1]) == "X" and ranks.living() == [members[0]]
    ranks.signal(members[1], signal.SIGKILL)  # gone: no error, and nobody else is hit
    ranks.close()


def test_a_program_that_cannot_be_started(started: list[Command], tmp_path: Path) -> None:
    command = Command.start(
        [str(tmp_path)], directory=tmp_path, env=os.environ, output=tmp_path / "out"
    )
    started.append(command)
    assert command.error == "Permission denied" and command.pid == 0


def test_a_process_that_shows_no_environment_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    then = "sys.stdin.readline(); os.execve('/bin/sleep', ['sleep', '60'], {'WHO': 'we'})"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os, sys; {then}"], env={}, stdin=subprocess.PIPE
    )
    try:
        monkeypatch.setattr(processes, "BLANK_LIMIT_S", 0.0)
        assert not processes.environment_has(process.pid, "WHO=we")
        monkeypatch.setattr(processes, "BLANK_LIMIT_S", LIMIT_S)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert processes.environment_has(process.pid, "WHO=we")
        process.kill()
        process.wait(LIMIT_S)
        assert not processes.environment_has(process.pid, "WHO=we")
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_all_goes_with_it_even_without_its_guard(started: list[Command], tmp_path: Path) -> None:
    # the command itself dies with its guard; what it had started belongs to nobody any more
    command = start(started, tmp_path, f"setsid {IDLE} & {IDLE} & wait")
    until(lambda: len(tree.below(command.guard_pid)) >= 3)
    pids = [(pid, row.started) for pid, row in tree.below(command.guard_pid).items()]
    assert len(pids) == 3
    os.kill(command.guard_pid, signal.SIGKILL)
    assert command.close(MARKED) == 0
    assert not [pid for pid, born in pids if processes.is_same(pid, born)]
    started.clear()


def test_asked_to_end_it_may_clean_up(started: list[Command], tmp_path: Path) -> None:
    command = start(started, tmp_path, f"trap 'echo bye > bye; exit 7' TERM; {IDLE} & wait")
    until(lambda: len(tree.below(command.guard_pid)) >= 2)
    command.terminate()
    until(lambda: ended(command))
    assert command.ended is not None and command.ended.exit_code == 7
    assert (tmp_path / "bye").exists()
