"""Lines for people: whoever reads along may go away."""

from __future__ import annotations

import io
import os
import sys
from types import SimpleNamespace

import pytest

from trainchaos.chaos.events.kinds import REQUIRED, Kind
from trainchaos.chaos.events.log import Event
from trainchaos.recovery.cli.console import ConsoleListener, Outage
from trainchaos.recovery.process.output import say
from trainchaos.recovery.supervise.supervision import Stage


def test_a_line_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    say("one")
    say("two", who="keeper of node 3")
    assert capsys.readouterr().err == "recovery: one\nkeeper of node 3: two\n"


class Gone(io.StringIO):
    """A pipe that nobody reads."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_nothing_ends_because_the_reader_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        monkeypatch.setattr(sys, "stderr", stream)
        say("to nobody")
    monkeypatch.undo()
    say("to somebody")
    assert capsys.readouterr().err == "recovery: to somebody\n"


def test_a_pipe_that_nobody_empties_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb", buffering=0) as read:
        monkeypatch.setattr(sys, "stderr", stream)
        for number in range(5000):
            say(f"line {number} {'x' * 100}")
        seen = read.read(1 << 20).decode().splitlines()
        assert 0 < len(seen) < 5000
        say("again")
        unshown = 5000 - len(seen)
        assert (
            read.read(1 << 20).decode() == f"recovery: ({unshown} lines could not be shown) again\n"
        )
        monkeypatch.undo()


@pytest.mark.parametrize(("ranks", "end"), [(2, "pids 7 gone\n"), (3000, " gone and 2936 more\n")])
def test_the_line_of_a_generation_names_as_many_pids_as_a_person_reads(
    ranks: int, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console = ConsoleListener(None)
    about = {"role": "worker", "mode": "warm", "node": 0}
    events = [
        (Kind.PROCESS_SPAWNED, {"process": "w0", "pid": 7, **about}),
        (Kind.RUN_STARTED, dict.fromkeys(REQUIRED[Kind.RUN_STARTED], 9)),
        (
            Kind.GENERATION_READY,
            {
                "members": [f"w{rank}" for rank in range(ranks)],
                "resume_step": 3,
                "checkpoint": None,
            },
        ),
    ]
    for kind, data in events:
        console.on_event(
            Event(kind=kind, actor="", seq=0, time_ns=0, generation=1, step=None, data=data)
        )
    said = capsys.readouterr().err
    assert f"{ranks} ranks train after step 3; pids 7 gone" in said and said.endswith(end)
    assert len(said.splitlines()[-1]) < 600


class Heard(ConsoleListener):
    """What it would tell a person."""

    def __init__(self) -> None:
        self.recovered: list[tuple[float, int]] = []

    def on_recovered(self, seconds: float, step: int) -> None:
        self.recovered.append((seconds, step))


class Job:
    """A supervisor at a stage of its job, at a time, with the step that its marks say."""

    def __init__(self) -> None:
        self.controller = SimpleNamespace(stage=Stage.TRAINING, outcome="", committed=7)
        self.seconds = 10.0

    def now_s(self) -> float:
        return self.seconds


@pytest.fixture
def broken() -> tuple[Heard, Outage, Job]:
    """A job that a failure has just stopped in step 8."""
    heard, job = Heard(), Job()
    outage = Outage(heard)
    outage.begins(job)  # type: ignore[arg-type]
    return heard, outage, job


def test_a_step_that_was_done_before_is_no_recovery(broken: tuple[Heard, Outage, Job]) -> None:
    """The members of a broken generation report their last step late, those of other nodes most."""
    heard, outage, job = broken
    job.controller.committed = 8
    for stage in (Stage.STOPPING, Stage.WAITING, Stage.FORMING):
        job.controller.stage = stage
        outage.look(job)  # type: ignore[arg-type]
    assert heard.recovered == []
    job.controller.stage, job.seconds = Stage.TRAINING, 10.5
    outage.look(job)  # type: ignore[arg-type]
    outage.look(job)  # type: ignore[arg-type]
    assert heard.recovered == [(0.5, 8)], "once"


def test_the_last_step_is_a_recovery_and_giving_up_is_none(
    broken: tuple[Heard, Outage, Job],
) -> None:
    heard, outage, job = broken
    job.controller.stage, job.controller.committed = Stage.ENDING, 8
    job.controller.outcome = "gave-up"
    outage.look(job)  # type: ignore[arg-type]
    assert heard.recovered == []
    job.controller.outcome = "completed"
    outage.look(job)  # type: ignore[arg-type]
    assert heard.recovered == [(0.0, 8)]
