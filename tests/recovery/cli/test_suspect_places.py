"""Places that are checked before a process rejoins there: which are, what becomes of them, and that
nobody waits.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.preflight import one
from trainchaos.harness.preflight.checks.findings import Finding, Findings
from trainchaos.recovery.cli.process_host import ProcessPlacement
from trainchaos.recovery.cli.processes import JobProcesses
from trainchaos.recovery.cli.suspect_places import LIMIT_S, SuspectPlaces, why_suspect
from trainchaos.recovery.health.readings.reports import HealthReport

BAD, GOOD = (0, "cuda:1"), (0, "cuda:0")
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."


class Bench:
    """Suspect places whose program is a line of Python, on a clock of the test's."""

    def __init__(self, program: str) -> None:
        self.now_s = 100.0
        self.events: list[dict[str, Any]] = []
        self.unfit: list[tuple[int, str, str]] = []
        self.places = SuspectPlaces(
            (sys.executable, "-c", program),
            record=self._record,
            unfit=lambda *found: self.unfit.append(found),
            now_s=lambda: self.now_s,
        )

    def _record(self, kind: Kind, **data: Any) -> None:
        assert kind is Kind.PLACE_CHECKED
        self.events.append(data)

    def pids(self) -> list[int]:
        found = [check.process for check in self.places._waiting.values()]
        return [process.pid for process in found if process is not None]

    def wait(self) -> None:
        """Until the programs that run have ended."""
        for pid in self.pids():
            fd = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(30_000), "it did not end"
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
    assert not here.places.avoids(BAD) and not here.unfit
    (said,) = here.events
    assert (said["fit"], said["node"], said["device"]) == (True, 0, "cuda:1")
    assert said["seconds"] == 3.0 and "differed" in said["why"]


def test_an_unfit_place_is_left_alone_for_good(bench: Callable[[str], Bench]) -> None:
    here = bench(says(False, "one word differs"))
    here.places.failed(BAD, "diverged", "")
    here.places.look()
    here.wait()
    assert here.unfit == [(0, "cuda:1", "one word differs")] and here.places.avoids(BAD)
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
    assert not here.places.avoids(BAD) and not here.unfit


def test_a_program_that_is_not_there_is_said(bench: Callable[[str], Bench]) -> None:
    here = bench("")
    here.places._command = ("/nowhere/to/be/found",)
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
    here.now_s += LIMIT_S / 2
    here.places.look()
    assert here.pids() == [pid]
    here.now_s += LIMIT_S
    here.places.look()
    assert here.unfit and "no answer" in here.unfit[0][2]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


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


@pytest.mark.real
def test_a_place_of_this_machine_is_fit() -> None:
    import subprocess

    command = [sys.executable, "-m", "trainchaos.harness.preflight.one", "--parent"]
    done = subprocess.run(
        [*command, str(os.getpid()), "cpu"], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0 and json.loads(done.stdout) == {"fit": True, "said": []}


def test_a_process_starts_on_a_suspect_spot_only_where_there_is_no_other(tmp_path: Path) -> None:
    spots = [
        ProcessPlacement(node=0, device=device, address="", events=tmp_path, logs=None)
        for device in ("cuda:0", "cuda:1")
    ]
    host: Any = SimpleNamespace(
        spots=lambda: spots, start=lambda name, spot, config, mode: 7, may_return=lambda: False
    )
    room: Any = SimpleNamespace(begins=lambda name: None)
    processes = JobProcesses(host, room, None, now_s=lambda: 0.0)
    suspects = {GOOD}
    processes.doubt(suspects.__contains__)

    def start() -> str:
        config: Any = None
        started = processes.start(
            "worker", "warm", lambda name, spot: config, stopped=lambda: False
        )
        return started.spot.device

    assert [start(), start()] == ["cuda:1", "cuda:0"], "the job does not wait for a check"
    processes.exited("w0")
    processes.forget("w0")
    suspects.add(BAD)
    assert processes.spots_in_use() == {GOOD}
    suspects.clear()
    assert start() == "cuda:1"


def test_a_process_does_not_start_where_another_gave_wrong_values(tmp_path: Path) -> None:
    spots = [
        ProcessPlacement(node=0, device=f"cuda:{index}", address="", events=tmp_path, logs=None)
        for index in range(3)
    ]
    host: Any = SimpleNamespace(
        spots=lambda: spots, start=lambda name, spot, config, mode: 7, may_return=lambda: False
    )
    room: Any = SimpleNamespace(begins=lambda name: None)
    processes = JobProcesses(host, room, None, now_s=lambda: 0.0)

    def start() -> str:
        config: Any = None
        return processes.start(
            "worker", "warm", lambda name, spot: config, stopped=lambda: False
        ).spot.device

    assert [start(), start()] == ["cuda:0", "cuda:1"]
    processes.distrust("w0")
    processes.distrust("nobody")
    processes.exited("w0")
    processes.forget("w0")
    assert start() == "cuda:2", "it is known after the process is forgotten"
    assert start() == "cuda:0", "there is no other that is free"
