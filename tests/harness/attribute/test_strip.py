"""Nothing of the injection is left in a stripped log, and a diagnosis needs none of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log, make_log, read_log
from trainchaos.chaos.fault.targets import BROKEN_DEVICE, NO_DEVICE_MEMORY
from trainchaos.harness.attribute.play import Sitting
from trainchaos.harness.explain import strip as stripping
from trainchaos.harness.explain.diagnose import diagnose
from trainchaos.harness.explain.strip import BETRAYING, betrayals, strip, write_stripped
from trainchaos.recovery.playbook.book import playbook

pytestmark = pytest.mark.slow
FAULTS = [kind for kind in Kind if kind.value.startswith("fault_")]


def changed(log: Log, change: object) -> Log:
    """The log with each event changed; None drops it."""
    assert callable(change)
    actors = []
    for actor in log.actors.values():
        events = tuple(new for event in actor.events if (new := change(event)) is not None)
        actors.append(replace(actor, events=events))
    return make_log(actors)


def words(sitting: Sitting) -> tuple[str, ...]:
    """What names the fault of a question."""
    return (*BETRAYING, '"fault', '"asked"', f'"{sitting.question.kind}"')


def logs(sittings: list[Sitting]) -> Iterator[tuple[Sitting, Log]]:
    """Each question with its log."""
    for sitting in sittings:
        assert sitting.log is not None
        yield sitting, sitting.log


def test_nothing_names_an_injected_fault_in_any_stripped_log(sittings: list[Sitting]) -> None:
    for sitting, log in logs(sittings):
        left = [event.to_line() for event in betrayals(strip(log), words(sitting))]
        assert left == [], sitting.question


@pytest.mark.parametrize("kind", FAULTS)
def test_a_kind_of_event_that_is_left_in_is_found(
    kind: Kind, sittings: list[Sitting], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_one = [log for _, log in logs(sittings) if log.first(kind) is not None]
    if kind is Kind.FAULT_FAILED:
        assert with_one == []  # every fault of the exam lands
        return
    monkeypatch.setattr(stripping, "HIDDEN", stripping.HIDDEN - {kind})
    left = strip(with_one[0])
    monkeypatch.undo()
    assert [event.kind for event in betrayals(left)][:1] == [kind]


def test_errors_and_reports_of_injected_faults_are_neutral(sittings: list[Sitting]) -> None:
    kinds = {"exception", "crash-loop", "health-event"}
    seen = set()
    for sitting, log in logs(sittings):
        if sitting.question.kind in kinds:
            assert next(betrayals(changed(log, _without_faults)), None) is not None
            seen.add(sitting.question.kind)
    assert seen == kinds


def test_of_an_emulated_device_error_the_words_of_a_real_one_are_left(
    sittings: list[Sitting],
) -> None:
    seen = {}
    for sitting, log in logs(sittings):
        if sitting.question.kind in ("gpu-oom", "gpu-error"):
            raised = strip(log).first(Kind.ERROR_RAISED)
            assert raised is not None
            seen[sitting.question.kind] = raised.data["type"], raised.data["message"]
    assert seen == {
        "gpu-oom": ("OutOfMemoryError", NO_DEVICE_MEMORY),
        "gpu-error": ("DeviceError", BROKEN_DEVICE),
    }


def _without_faults(event: Event) -> Event | None:
    return None if event.kind in FAULTS else event


def test_no_gap_tells_where_an_event_was(sittings: list[Sitting], tmp_path: Path) -> None:
    for number, (_, log) in enumerate(logs(sittings)):
        bare = strip(log)
        for actor in bare.actors.values():
            assert [event.seq for event in actor.events] == list(range(len(actor.events)))
        if number % 8 == 0:
            write_stripped(log, tmp_path / str(number))
            again = read_log(tmp_path / str(number))
            assert again.events == bare.events
            assert again.problems == bare.problems


def test_last_numbers_are_those_of_the_stripped_log(sittings: list[Sitting]) -> None:
    hidden = 0
    for _, log in logs(sittings):
        bare, effects = strip(log), 0
        exits = zip(log.of(Kind.PROCESS_EXITED), bare.of(Kind.PROCESS_EXITED), strict=True)
        for before, after in exits:
            if before.data["last_seq"] is None:
                continue
            name = before.data["process"]
            shown = [e for e in log.by(name) if e.kind not in stripping.HIDDEN]
            later = [e for e in shown if e.seq > before.data["last_seq"]]
            effects += len(log.by(name)) - len(bare.by(name))
            left = [e for e in bare.by(name) if e.seq > after.data["last_seq"]]
            assert [e.time_ns for e in left] == [e.time_ns for e in later]
        hidden += effects
    assert hidden > 0


def test_whether_a_run_was_faulted_is_not_told(sittings: list[Sitting]) -> None:
    arms = set()
    for _, log in logs(sittings):
        started = strip(log).first(Kind.RUN_STARTED)
        assert started is not None
        arms.add((started.data["arm"], started.data["cell"]))
    assert arms == {("control", "exam")}


def test_a_diagnosis_is_the_same_with_and_without_fault_events(sittings: list[Sitting]) -> None:
    book = playbook()
    for sitting, log in logs(sittings):
        assert diagnose(log, book) == diagnose(strip(log), book), sitting.question


def _lying(event: Event) -> Event:
    """Fault events that name another fault, of another rank."""
    if event.kind not in FAULTS:
        return event
    lie = {"kind": "process-segv", "target": {"process": "w1", "rank": 1, "nodes": [1]}}
    data = {name: lie.get(name, value) for name, value in event.data.items()}
    return replace(event, data=data)


def test_a_diagnosis_believes_no_fault_event(sittings: list[Sitting]) -> None:
    book = playbook()
    for sitting, log in logs(sittings):
        assert diagnose(changed(log, _lying), book) == diagnose(log, book), sitting.question
