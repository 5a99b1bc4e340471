"""Nothing of the injection is left in a stripped log, and a diagnosis needs none of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.attribution.exam import write
from tests.benchmarks.exam import ALL, SOME, Played, sat
from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log, make_log, read_log
from trainchaos.chaos.fault.targets import BROKEN_DEVICE, NO_DEVICE_MEMORY
from trainchaos.harness.explain.diagnose import diagnose
from trainchaos.harness.explain.strip import strip

pytestmark = pytest.mark.slow
NEW = (Kind.STACKS_DUMPED, Kind.CLOCK_MEASURED)


@pytest.fixture(params=[SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def sittings(request: pytest.FixtureRequest) -> Played:
    return sat(request.param)


def betrayals(log: Log, kind: str) -> list[str]:
    """Events that name an injected fault."""
    words = ('"fault', '"asked"', f'"{kind}"', "inject", "emulat", *(one.value for one in NEW))
    lines = [event.to_line() for event in log.events]
    return [line for line in lines if any(word in line.lower() for word in words)]


def test_nothing_names_an_injected_fault(sittings: Played) -> None:
    raised = set()
    for question, log in sittings:
        bare = strip(log)
        assert betrayals(bare, question.kind) == [], question
        assert question.truth == "" or betrayals(log, question.kind), "else nothing was hidden"
        started = bare.first(Kind.RUN_STARTED)
        assert started is not None
        assert (started.data["arm"], started.data["cell"]) == ("control", "exam")
        if question.kind in ("gpu-oom", "gpu-error") and (error := bare.first(Kind.ERROR_RAISED)):
            raised.add((question.kind, error.data["type"], error.data["message"]))
    assert raised == {
        ("gpu-oom", "OutOfMemoryError", NO_DEVICE_MEMORY),
        ("gpu-error", "DeviceError", BROKEN_DEVICE),
    }, "of an emulated error of a device the words of a real one are left"


def test_no_gap_tells_where_an_event_was(sittings: Played, tmp_path: Path) -> None:
    hidden = 0
    for question, log in sittings:
        bare = strip(log)
        for actor in bare.actors.values():
            assert [event.seq for event in actor.events] == list(range(len(actor.events)))
        for before, after in zip(
            log.of(Kind.PROCESS_EXITED), bare.of(Kind.PROCESS_EXITED), strict=True
        ):
            if before.data["last_seq"] is None:
                continue
            name = before.data["process"]
            kept = {event.time_ns for event in bare.by(name)}
            hidden += len(log.by(name)) - len(kept)
            assert [e.time_ns for e in bare.by(name) if e.seq > after.data["last_seq"]] == [
                e.time_ns
                for e in log.by(name)
                if e.seq > before.data["last_seq"] and e.time_ns in kept
            ]
        write(bare, tmp_path / question.id)
        again = read_log(tmp_path / question.id)
        assert (again.events, again.problems) == (bare.events, bare.problems)
    assert hidden > 0


def changed(log: Log, change: object) -> Log:
    """The log with each event changed."""
    assert callable(change)
    actors = [
        replace(actor, events=tuple(change(event) for event in actor.events))
        for actor in log.actors.values()
    ]
    return make_log(actors)


def lying(event: Event) -> Event:
    """Fault events that name another fault, of another rank."""
    if not event.kind.value.startswith("fault_"):
        return event
    lie = {"kind": "process-segv", "target": {"process": "w1", "rank": 1, "nodes": [1]}}
    return replace(event, data={name: lie.get(name, value) for name, value in event.data.items()})


def test_a_diagnosis_believes_no_fault_event(sittings: Played) -> None:
    for question, log in sittings:
        said = diagnose(log)
        assert said == diagnose(strip(log)), question
        assert said == diagnose(changed(log, lying)), question
