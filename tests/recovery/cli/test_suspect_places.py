"""Places that are checked before a process rejoins there: which are, what becomes of them, and that
nobody waits.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.running import until
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, EventWriter, Kind
from trainchaos.harness.preflight import one
from trainchaos.harness.preflight.checks.findings import Finding, Findings
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.cli.roster import ScriptRoster
from trainchaos.recovery.cli.takeover_log import TakeoverLog, read_takeover_log
from trainchaos.recovery.health.care.place_check import (
    LIMIT_S,
    MOST_LOOK_S,
    Answer,
    PlaceChecks,
)
from trainchaos.recovery.health.care.suspect_places import SuspectPlaces, why_suspect
from trainchaos.recovery.health.readings.reports import HealthReport
from trainchaos.recovery.health.taint import made, of_place
from trainchaos.recovery.nodes.coordinator.node_state import (
    NodeChecked,
    NodeGone,
    NodeJoined,
    NodeLost,
)
from trainchaos.recovery.nodes.coordinator.place_checks import SLACK_S, NodeChecks
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.process.host import Exited
from trainchaos.recovery.process.processes import state

BAD, GOOD = (0, "cuda:1"), (0, "cuda:0")
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."

NOW = datetime.now(UTC)


class Bench:
    """Suspect places whose program is a line of Python, on a clock of the test's."""

    def __init__(self, program: str) -> None:
        self.now_s = 100.0
        self.events: list[dict[str, Any]] = []
        self.found: list[Answer] = []
        self.checks = PlaceChecks((sys.executable, "-c", program), now_s=lambda: self.now_s)
        self.places = SuspectPlaces(
            self.checks, record=self._record, found=self.found.append, now_s=lambda: self.now_s
        )

    def _record(self, kind: Kind, **data: Any) -> None:
        assert kind is Kind.PLACE_CHECKED
        self.events.append(data)

    def pids(self) -> list[int]:
        return list(self.checks.pids)

    def looks(self, seconds: float) -> None:
        """As the supervisor does for so long."""
        for _ in range(round(seconds / MOST_LOOK_S)):
            self.now_s += MOST_LOOK_S
            self.places.look()

    def wait(self) -> None:
        """Until the programs that run have ended."""
        for pid in self.pids():
            fd = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(120_000), "it did not end"
            os.close(fd)
        self.places.look()


@pytest.fixture
def bench() -> Iterator[Callable[[str], Bench]]:
    made: list[Bench] = []

    def make(program: str) -> Bench:
        made.append(Bench(program))
        return made[-1]

    yield make
    for each in made:
        each.places.close()


def says(fit: bool | None, said: str = "") -> str:
    return f"import sys; print({json.dumps({'fit': fit, 'said': [said]})!r}); print(sys.argv[1])"


@pytest.mark.parametrize(
    ("cause", "detail", "suspect"),
    [
        ("diverged", "parameters of step 3 differ", True),
        ("exit", f"signal 6\n{XID}", True),
        ("exit", "signal 9", False),
        ("error", "ValueError: a bug of the script's", False),
        ("hang", "silent for 3 s", False),
    ],
)
def test_only_what_hardware_may_have_caused_makes_a_place_suspect(
    bench: Callable[[str], Bench], cause: str, detail: str, suspect: bool
) -> None:
    assert bool(why_suspect(cause, detail)) is suspect
    here = bench(says(True))
    here.places.failed(BAD, cause, detail)
    assert here.places.avoids(BAD) is suspect and not here.places.avoids(GOOD)


def test_a_place_is_used_again_once_it_is_fit(bench: Callable[[str], Bench]) -> None:
    here = bench(says(True))
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    assert here.places.avoids(BAD), "nobody waits for a check, or takes it for passed"
    here.now_s += 3.0
    here.wait()
    assert not here.places.avoids(BAD)
    assert here.found == [Answer(BAD, True, "")], "what was warned of is used again, too"
    (said,) = here.events
    assert (said["fit"], said["node"], said["device"]) == (True, 0, "cuda:1")
    assert said["seconds"] == 3.0 and "differed" in said["why"]


def test_an_unfit_place_is_left_alone_for_good(bench: Callable[[str], Bench]) -> None:
    here = bench(says(False, "one word differs"))
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    here.wait()
    assert here.found == [Answer(BAD, False, "one word differs")] and here.places.avoids(BAD)
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    assert not here.pids(), "it is not asked again"


@pytest.mark.parametrize(
    "program", ["import sys; sys.exit(3)", "print('{')", "print('[1]')", says(None, "no device")]
)
def test_without_an_answer_the_place_is_used_as_before(
    bench: Callable[[str], Bench], program: str
) -> None:
    here = bench(program)
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    here.wait()
    assert [said["fit"] for said in here.events] == [None]
    assert not here.places.avoids(BAD) and not here.found


def test_a_program_that_is_not_there_is_said(bench: Callable[[str], Bench]) -> None:
    here = bench("")
    here.checks._command = ("/nowhere/to/be/found",)
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    assert "cannot be checked" in here.events[0]["said"] and not here.places.avoids(BAD)


def test_a_check_that_does_not_answer_is_ended_and_its_place_unfit(
    bench: Callable[[str], Bench],
) -> None:
    here = bench("import signal; signal.pause()")
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    (pid,) = here.pids()
    here.looks(LIMIT_S)
    assert here.pids() == [pid]
    here.looks(2)
    assert [one.fit for one in here.found] == [False] and "no answer" in here.found[0].said
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_time_in_which_nobody_looks_is_not_the_places(bench: Callable[[str], Bench]) -> None:
    """The machine of supervisor, check and device stood still, such as a paused node."""
    here = bench("import signal; signal.pause()")
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    here.now_s += 10 * LIMIT_S
    here.places.look()
    assert len(here.pids()) == 1 and not here.found


def test_a_place_whose_check_was_stopped_is_not_unfit(bench: Callable[[str], Bench]) -> None:
    here = bench("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    (pid,) = here.pids()
    until(lambda: state(pid) == "T")
    here.looks(LIMIT_S + 2)
    assert not here.found and not here.places.avoids(BAD)
    assert [one["fit"] for one in here.events] == [None] and "was stopped" in here.events[0]["said"]


def test_an_answer_that_was_there_in_time_counts_though_nobody_looked(
    bench: Callable[[str], Bench],
) -> None:
    here = bench(says(True))
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    here.looks(LIMIT_S - 1)
    here.now_s += 2 * LIMIT_S
    here.wait()
    assert [one.fit for one in here.found] == [True] and not here.places.avoids(BAD)


def test_one_at_a_time_and_none_is_left_behind(bench: Callable[[str], Bench]) -> None:
    here = bench("import signal; signal.pause()")
    report = HealthReport(what="xid", code=79, node=0, source="nvml")
    here.places.heard(report, [GOOD, BAD])
    here.places.heard(report.model_copy(update={"code": 94}), [(1, "cuda:0")])
    here.places.look()
    assert here.places.avoids(GOOD) and here.places.avoids(BAD)
    assert not here.places.avoids((1, "cuda:0")), "a contained error is no warning"
    (pid,) = here.pids()
    here.places.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_a_lost_supervisor_had_found_unfit_stays_so(bench: Callable[[str], Bench]) -> None:
    here = bench(says(True))
    data = {"node": 0, "why": "", "said": "", "seconds": 1.0}
    here.places.recall(
        Event(
            kind=Kind.PLACE_CHECKED,
            actor=ORCHESTRATOR,
            seq=seq,
            time_ns=seq,
            generation=1,
            step=None,
            data={**data, "device": device, "fit": fit},
        )
        for seq, (device, fit) in enumerate([("cuda:0", True), ("cuda:1", False)])
    )
    assert here.places.avoids(BAD) and not here.places.avoids(GOOD)
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    assert not here.pids()


# ---- of nodes


class Asked:
    """The checks of two nodes, on a clock of the test's."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.asked: list[tuple[int, str]] = []
        self.lost: set[int] = set()
        self.checks = NodeChecks(self._ask, now_s=lambda: self.now_s)

    def _ask(self, node: int, device: str) -> None:
        if node in self.lost:
            raise NodeGone(node, "the power failed")
        self.asked.append((node, device))

    def answers(self) -> list[tuple[Any, ...]]:
        return [(*one.spot, one.fit) for one in self.checks.take()]


def test_agents_are_asked_by_the_names_of_their_own_devices() -> None:
    nodes = Asked()
    nodes.checks.begin((0, "cuda:0@n0"))
    nodes.checks.begin((1, "cuda:0@n1"))
    assert nodes.asked == [(0, "cuda:0"), (1, "cuda:0")] and not nodes.answers()
    nodes.checks.hear(NodeChecked(node=1, device="cuda:0", fit=False, said="a word differs"))
    assert nodes.answers() == [(1, "cuda:0@n1", False)], "node 0 has not answered"
    nodes.checks.hear(NodeChecked(node=1, device="cuda:0", fit=True, said=""))
    nodes.checks.hear(NodeChecked(node=0, device="cuda:3", fit=True, said=""))
    assert not nodes.answers(), "nobody asked that"


def test_a_node_that_goes_knows_nothing_of_its_places() -> None:
    nodes = Asked()
    nodes.checks.begin((0, "cpu"))
    nodes.checks.begin((1, "cpu"))
    nodes.checks.hear(NodeLost(node=0, why="the power failed"))
    assert nodes.answers() == [(0, "cpu", None)]
    nodes.lost.add(0)
    nodes.checks.begin((0, "cpu"))
    assert nodes.answers() == [(0, "cpu", None)]


def test_that_an_agent_joined_is_heard_after_it_was_asked_by_one_that_takes_over() -> None:
    nodes = Asked()
    nodes.checks.begin((0, "cpu"))
    nodes.checks.hear(NodeJoined(node=0, info=cast(Any, None)))
    assert not nodes.answers(), "it is the agent that was asked"
    nodes.checks.hear(NodeChecked(node=0, device="cpu", fit=False, said="a word differs"))
    assert nodes.answers() == [(0, "cpu", False)]


def test_an_agent_that_does_not_answer_is_not_waited_for_without_bound() -> None:
    nodes = Asked()
    nodes.checks.begin((0, "cuda:0"))
    nodes.checks.begin((0, "cuda:1"))
    nodes.now_s += LIMIT_S + 1
    assert not nodes.answers(), "its agent ends it at the limit, and has to say so"
    nodes.now_s += SLACK_S
    assert nodes.answers() == [(0, "cuda:0", None)]
    nodes.now_s += LIMIT_S
    assert nodes.answers() == [(0, "cuda:1", None)], "one after the other"


# ---- the program


def found(state: Any, said: str) -> Findings:
    return Findings(findings=[Finding(check="memory", place="cpu:0", state=state, said=said)])


@pytest.mark.parametrize(
    ("state", "fit", "status"), [("fit", True, 0), ("unfit", False, 1), ("unmeasured", None, 7)]
)
def test_the_program_says_what_was_measured(
    capsys: pytest.CaptureFixture[str], state: str, fit: bool | None, status: int
) -> None:
    asked = []

    def measure(place: str, *, total_s: float) -> Findings:
        asked.append((place, total_s))
        return found(state, "64 MiB")

    assert one.main(["--seconds", "5", "cpu"], measure=measure) == status
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"fit": fit, "said": [] if fit else ["64 MiB"]} and asked == [("cpu:0", 5.0)]


def test_a_place_that_there_cannot_be_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        one.main(["gpu"])
    assert ended.value.code == 2 and "'gpu' is no place" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.real
def test_a_place_of_this_machine_is_fit() -> None:
    import subprocess

    command = [sys.executable, "-m", "trainchaos.harness.preflight.one", "--parent"]
    done = subprocess.run(
        [*command, str(os.getpid()), "cpu"], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0 and json.loads(done.stdout) == {"fit": True, "said": []}


def roster_of(
    devices: int,
    log: TakeoverLog | None = None,
    *,
    now_s: float = 0.0,
    tainted: AvoidedPlaces = AvoidedPlaces(()),
) -> ScriptRoster:
    """The roster of a job on one node with so many GPUs."""
    host: Any = SimpleNamespace(
        now_ns=lambda: int(now_s * 1e9),
        usable=lambda: [0],
        places_on=lambda node: [f"cuda:{index}" for index in range(devices)],
        spawn=lambda name, role, mode, device, node: 7,
        may_return=lambda: False,
    )
    room: Any = SimpleNamespace(begins=lambda name: None)
    return ScriptRoster(host, room, log, tainted, lambda *_, **__: None, lambda: False)


def started(roster: ScriptRoster, count: int = 1) -> list[str]:
    return [roster.start("worker", "warm").device for _ in range(count)]


def ends(roster: ScriptRoster, name: str) -> None:
    roster.exited(Exited(process=name, exit_code=1, signal=None, time_ns=0))
    roster.forget(name)


def test_a_process_starts_on_a_suspect_spot_only_where_there_is_no_other() -> None:
    roster, suspects = roster_of(2), {GOOD}
    roster.doubt(suspects.__contains__)
    assert started(roster, 2) == ["cuda:1", "cuda:0"], "the job does not wait for a check"
    ends(roster, "w0")
    suspects.add(BAD)
    assert roster.spots_in_use() == {GOOD}
    suspects.clear()
    assert started(roster) == ["cuda:1"]


def test_a_process_does_not_start_at_a_tainted_device_while_there_are_others() -> None:
    taint = made({**of_place("a/cuda:0"), "reason": "XID 79", "since": NOW, "by": "alarm"})
    tainted = AvoidedPlaces([taint])
    tainted.hosts_are({0: "a"})
    assert started(roster_of(2, tainted=tainted), 2) == ["cuda:1"] * 2


def test_a_process_does_not_start_where_another_gave_wrong_values() -> None:
    roster = roster_of(3)
    assert started(roster, 2) == ["cuda:0", "cuda:1"]
    roster.distrust("w0")
    roster.distrust("nobody")
    ends(roster, "w0")
    assert started(roster) == ["cuda:2"], "it is known after the process is forgotten"
    assert started(roster) == ["cuda:0"], "there is no other that is free"


@pytest.mark.parametrize(
    ("cause", "times", "avoided"),
    [("exit", 3, True), ("exit", 2, False), ("notice", 3, False), ("diverged", 1, True)],
)
def test_whoever_takes_over_knows_where_processes_failed(
    tmp_path: Path, cause: str, times: int, avoided: bool
) -> None:
    seconds = itertools.count(0, 2)
    writer = EventWriter(tmp_path, ORCHESTRATOR, lambda: next(seconds) * 10**9)
    writer.write(Kind.ACTOR_STARTED, pid=1, host="here", wall_ns=1, boot=boot_id())
    spawned = {"pid": 7, "role": "worker", "mode": "warm", "node": 0, "device": "cuda:0"}
    failed = {"failure": 1, "rank": 0, "cause": cause, "detail": ""}
    for number in range(times):
        writer.write(Kind.PROCESS_SPAWNED, process=f"w{number}", **spawned)
        gone = {"pid": 7, "exit_code": 1, "signal": None, "expected": False, "last_seq": 0}
        writer.write(Kind.PROCESS_EXITED, process=f"w{number}", **gone)
        writer.write(Kind.FAILURE_DETECTED, step=1, process=f"w{number}", **failed)
    began = {"members": ["w9"], "state": "peer", "source": None, "cause": "failure"}
    writer.write(Kind.GENERATION_STARTED, **began)
    writer.close()
    log = read_takeover_log(tmp_path)
    assert isinstance(log, TakeoverLog)
    assert started(roster_of(2, log, now_s=25.0)) == ["cuda:1" if avoided else "cuda:0"]
