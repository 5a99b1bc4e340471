"""What a supervisor makes of places that an earlier one knew to fail; devices of one name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.recovery.health.test_job_watch import Watched
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.recovery.cli import job_health
from trainchaos.recovery.cli.job_health import JobHealth
from trainchaos.recovery.health.care.place_care import NO_CARE, PlaceCare
from trainchaos.recovery.health.readings.reports import HealthReport

SPOTS = {"w0": (0, "cuda:0"), "w1": (0, "cuda:1"), "w2": (1, "cuda:0"), "w3": (1, "cuda:1")}


def report(**place: int | str) -> dict[str, Any]:
    return HealthReport.model_validate(
        {"what": "xid", "code": 79, "source": "nvml", **place}
    ).model_dump()


def warned(folder: Path, *said: Mapping[str, Any] | tuple[Kind, Mapping[str, Any]]) -> set[str]:
    """Who is warned by a supervisor that recalls these reports, and events of other kinds, of four
    ranks on two nodes.
    """
    told: dict[str, str] = {}

    def on_warnings(warnings: Mapping[str, str]) -> None:
        told.update(warnings)

    def no_better_place(processes: Iterable[str]) -> None:
        assert not list(processes)

    controller: Any = SimpleNamespace(
        process_of="w{}".format, steps=0, on_warnings=on_warnings, no_better_place=no_better_place
    )
    processes: Any = SimpleNamespace(
        pids=dict.fromkeys(SPOTS, 1),
        spot_of=SPOTS.get,
        avoid=lambda fails: None,
        spots_in_use=SPOTS.values,
    )
    care = PlaceCare(NO_CARE, processes, print, lambda: 0.0, str)
    spec: Any = SimpleNamespace(events=folder, shards=1)
    health = JobHealth(processes, controller, None, lambda *_, **__: None, spec, care)
    known = [one if isinstance(one, tuple) else (Kind.HEALTH_REPORTED, one) for one in said]
    events = [
        Event(
            kind=kind,
            actor=ORCHESTRATOR,
            seq=seq,
            time_ns=seq,
            generation=1,
            step=None,
            data=dict(data),
        )
        for seq, (kind, data) in enumerate(known)
    ]
    health.recall(events)
    health.look()
    return set(told)


@pytest.mark.parametrize(
    ("data", "who"),
    [
        (report(node=1, device="cuda:0"), {"w2"}),
        (report(node=0), {"w0", "w1"}),
        (report(node=1, rank=2), set()),
        (report(), set()),
    ],
)
def test_places_that_were_known_to_fail_are_recalled_and_ranks_are_not(
    tmp_path: Path, data: Mapping[str, Any], who: set[str]
) -> None:
    """Another process may hold the rank by now; every node has a first device."""
    assert warned(tmp_path, data) == who


def checked(*, fit: bool | None, node: int = 1, device: str = "cuda:0") -> Any:
    return Kind.PLACE_CHECKED, {"node": node, "device": device, "fit": fit}


def test_a_device_that_was_found_fit_since_warns_nobody_again(tmp_path: Path) -> None:
    bad = report(node=1, device="cuda:0")
    assert warned(tmp_path, bad, checked(fit=True)) == set()
    assert warned(tmp_path, checked(fit=True), bad) == {"w2"}, "it was found afterwards"
    assert warned(tmp_path, bad, checked(fit=None)) == {"w2"}
    assert warned(tmp_path, bad, checked(fit=True, device="cuda:1")) == {"w2"}
    whole = report(node=1)
    assert warned(tmp_path, whole, checked(fit=True)) == warned(tmp_path, whole) != set()


def test_an_alarm_of_the_job_is_recorded_and_moves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    monkeypatch.setattr(
        job_health, "job_service", lambda *_, **__: (watched.service, watched.detectors)
    )
    events: list[tuple[Kind, dict[str, Any]]] = []
    controller: Any = SimpleNamespace(steps=500)
    processes: Any = SimpleNamespace(pids={})
    health = JobHealth(
        processes,
        controller,
        None,
        lambda kind, **data: events.append((kind, data)),
        SimpleNamespace(events=tmp_path, shards=1),  # type: ignore[arg-type]
        PlaceCare(NO_CARE, processes, print, lambda: 0.0, str),
    )
    for step in range(400):
        watched.ranks.commit(loss=500.0 if step == 300 else 2.0 + step % 7 / 50)
        watched.service.look()
        health.look()
    ((kind, data),) = events
    assert (kind, data["what"], data["rank"]) == (Kind.HEALTH_ALARM, "loss-spike", None)
    assert watched.detectors.steps == 500
