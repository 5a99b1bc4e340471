"""What a supervisor makes of places that an earlier one knew to fail; devices of one name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.recovery.health.test_job_watch import Watched
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.recovery.cli.roster import device_at
from trainchaos.recovery.health.care.place_care import NO_CARE, PlaceCare
from trainchaos.recovery.health.readings.reports import HealthReport
from trainchaos.recovery.supervise.job_health import JobHealth

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

    controller: Any = SimpleNamespace(on_warnings=on_warnings, no_better_place=no_better_place)
    roster: Any = SimpleNamespace(
        living=lambda: SPOTS,
        gone=lambda name: False,
        node_of=lambda name: SPOTS[name][0],
        device_of=lambda name: device_at(*SPOTS[name]),
        spot_of=SPOTS.get,
        avoid=lambda *, nodes, devices: None,
        spots_in_use=SPOTS.values,
    )
    care = PlaceCare(NO_CARE, roster, print, lambda: 0.0, str)
    record: Any = print
    health = JobHealth(roster, care, record, "w{}".format, [], device_at)
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
    health.look(lambda act: act(controller))
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


def test_an_alarm_of_the_job_is_recorded_and_moves_nobody(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    events: list[tuple[Kind, dict[str, Any]]] = []
    roster: Any = SimpleNamespace(avoid=None, spots_in_use=lambda: ())
    record: Any = lambda kind, **data: events.append((kind, data))  # noqa: E731
    care = PlaceCare(NO_CARE, roster, record, lambda: 0.0, str)
    health = JobHealth(roster, care, record, lambda rank: None, [watched.service.take])
    for step in range(400):
        watched.ranks.commit(loss=500.0 if step == 300 else 2.0 + step % 7 / 50)
        watched.service.look()
        health.look(lambda act: pytest.fail("nobody is warned"))
    ((kind, data),) = events
    assert (kind, data["what"], data["rank"]) == (Kind.HEALTH_ALARM, "loss-spike", None)
