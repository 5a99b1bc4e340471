"""Whether suspect places were checked before a process rejoined there, and kept out if unfit."""

from __future__ import annotations

import math

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.fault import FaultSpec
from trainchaos.harness.judge.evidence.evidence import Evidence, some, verdict_of
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import NS
from trainchaos.harness.judge.results import Finding

_WORDS = {True: "fit", False: "unfit", None: "not known to be fit"}


def rejoins(evidence: Evidence) -> Finding:
    """The place of each occurrence of a fault with ``expect.preflight`` was checked, and found as
    expected. No process started there while it was checked, nor after if it was unfit, as long as
    there was another place; at least one did after if it was fit. What cannot be measured on a
    machine is inconclusive.
    """
    problems: list[str] = []
    met: list[str] = []
    missing: list[str] = []
    for episode in evidence.measures.episodes:
        fault = evidence.fault(episode.fault)
        if fault is None or fault.expect.preflight is None or episode.injected is None:
            continue
        if episode.landed is None:
            missing.append(f"{fault.id} never landed, so that no preflight was due")
            continue
        spots = _spots(evidence, episode)
        if not spots:
            missing.append(f"{fault.id} hit no process, so that no place was suspect")
        for spot in spots:
            checked = _checked(evidence, episode, spot)
            if checked is None:
                problems.append(f"{fault.id}: {_said(spot)} was not checked")
            elif checked.data["fit"] is None:
                missing.append(f"{fault.id}: {_said(spot)}: {checked.data['said']}")
            else:
                wrong, said = _used(evidence, fault, spot, checked)
                (problems if wrong else met).append(f"{fault.id}: {said}")
    return verdict_of(problems, some(met) or "no preflight was due", missing)


def _used(
    evidence: Evidence, fault: FaultSpec, spot: tuple[int, str], checked: Event
) -> tuple[bool, str]:
    """Whether what became of a checked place is wrong, and what became of it."""
    found = _WORDS[checked.data["fit"]]
    said = f"{_said(spot)} is {found}"
    if found != fault.expect.preflight:
        return True, f"{said}, should be {fault.expect.preflight}: {checked.data['said']}"
    since_ns = checked.time_ns - round(checked.data["seconds"] * NS)
    started = [event for event in _started(evidence, spot) if event.time_ns > since_ns]
    early = [event for event in started if event.time_ns < checked.time_ns]
    later = [event for event in started if event.time_ns >= checked.time_ns]
    for event in early if found == "fit" else started:
        if other := _other_place(evidence, spot, event.time_ns):
            when = "before it was checked" if event in early else f"though it is {found}"
            name = event.data["process"]
            return True, f"{name} started on {_said(spot)} {when}, and not on {_said(other)}"
    if found == "unfit":
        return False, f"{said}, and {_names(later)} there later"
    return not later, f"{said}, and {_names(later)} there later"


def _spots(evidence: Evidence, episode: Episode) -> list[tuple[int, str]]:
    """Node and device of each process that an occurrence hit."""
    spawned = evidence.log.of(Kind.PROCESS_SPAWNED)
    return [_spot(event) for event in spawned if event.data["process"] in episode.processes]


def _checked(evidence: Evidence, episode: Episode, spot: tuple[int, str]) -> Event | None:
    """The first check of a place that ended after an occurrence."""
    assert episode.injected is not None
    for event in evidence.log.of(Kind.PLACE_CHECKED):
        if event.time_ns > episode.injected.time_ns and _spot(event) == spot:
            return event
    return None


def _other_place(evidence: Evidence, spot: tuple[int, str], at_ns: int) -> tuple[int, str] | None:
    """A place that could have been taken instead, of those that processes of this job ever had:
    its node is there, nothing is held against it, and, if it is a GPU, nobody has it.
    """
    for other in sorted({_spot(event) for event in evidence.log.of(Kind.PROCESS_SPAWNED)}):
        taken = other[1].startswith("cuda") and _occupied(evidence, other, at_ns)
        if other != spot and not (
            taken or _suspect(evidence, other, at_ns) or _node_lost(evidence, other[0], at_ns)
        ):
            return other
    return None


def _suspect(evidence: Evidence, spot: tuple[int, str], at_ns: int) -> bool:
    """Whether a place was being checked, or had been found unfit."""
    return any(
        _spot(event) == spot
        and event.time_ns - round(event.data["seconds"] * NS) <= at_ns
        and (at_ns < event.time_ns or event.data["fit"] is False)
        for event in evidence.log.of(Kind.PLACE_CHECKED)
    )


def _occupied(evidence: Evidence, spot: tuple[int, str], at_ns: int) -> bool:
    return any(
        event.time_ns < at_ns < evidence.history.exited_ns.get(event.data["process"], math.inf)
        for event in _started(evidence, spot)
    )


def _node_lost(evidence: Evidence, node: int, at_ns: int) -> bool:
    told = [
        event
        for event in evidence.log.of(Kind.NODE_JOINED, Kind.NODE_LOST)
        if event.data["node"] == node and event.time_ns < at_ns
    ]
    return bool(told) and told[-1].kind is Kind.NODE_LOST


def _started(evidence: Evidence, spot: tuple[int, str]) -> list[Event]:
    return [event for event in evidence.log.of(Kind.PROCESS_SPAWNED) if _spot(event) == spot]


def _spot(event: Event) -> tuple[int, str]:
    return int(event.data["node"]), str(event.data["device"])


def _said(spot: tuple[int, str]) -> str:
    return f"{spot[1]} of node {spot[0]}"


def _names(started: list[Event]) -> str:
    names = ", ".join(str(event.data["process"]) for event in started)
    return f"{names} started" if names else "no process started"
