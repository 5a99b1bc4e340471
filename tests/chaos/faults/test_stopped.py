"""A stopped process does nothing until its undoing begins, however late that is written."""

from __future__ import annotations

from typing import Any

import pytest

from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Event, Kind, make_log
from trainchaos.chaos.fault.aftermath import Aftermath, Occurrence, StandsStill

MS = 1_000_000
LANDED, BEGUN, HEALED, END = 100 * MS, 600 * MS, 650 * MS, 900 * MS


def line(actor: str, kind: Kind, time_ns: int, **data: Any) -> Event:
    return Event(kind=kind, actor=actor, seq=0, time_ns=time_ns, generation=1, step=20, data=data)


def breaches(worked_ns: int, **healed: Any) -> list[str]:
    """Of a log in which w1 works at one time, and is stopped until it is healed."""
    same = {"fault": "stop", "occurrence": 0}
    own = (
        line(ORCHESTRATOR, Kind.FAULT_LANDED, LANDED, **same, witness="kernel", evidence={}),
        line(
            ORCHESTRATOR, Kind.FAULT_HEALED, HEALED, **same, how="its duration was over", **healed
        ),
        line(ORCHESTRATOR, Kind.RUN_FINISHED, END, outcome="completed", reason=""),
    )
    work = line("w1", Kind.PARKED, worked_ns, applied=20, valid=True)
    log = make_log(
        [
            ActorLog(actor=name, events=events, problems=(), ended=True)
            for name, events in ((ORCHESTRATOR, own), ("w1", (work,)))
        ]
    )
    occurrence = Occurrence(fault="stop", number=0, process="w1", processes=("w1",))
    after = Aftermath(occurrence=occurrence, landed=own[0], healed=own[1], log=log, observed=False)
    return [breach.text for breach in StandsStill().breaches(after)]


@pytest.mark.parametrize(
    ("worked_ns", "healed", "count"),
    [
        (BEGUN + 20 * MS, {"begun_ns": BEGUN}, 0),
        (BEGUN - 20 * MS, {"begun_ns": BEGUN}, 1),
        (BEGUN + 20 * MS, {}, 1),  # an older log
        (HEALED + 20 * MS, {}, 0),
    ],
)
def test_it_is_free_once_its_undoing_began(
    worked_ns: int, healed: dict[str, int], count: int
) -> None:
    assert len(breaches(worked_ns, **healed)) == count
