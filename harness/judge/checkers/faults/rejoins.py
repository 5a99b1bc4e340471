"""Whether suspect places were checked before a process rejoined there, and kept out if unfit."""

from __future__ import annotations

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.fault import FaultSpec
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, some, unknown
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.results import Finding

NS = 1e9
_WORDS = {True: "fit", False: "unfit", None: "not known to be fit"}


def wanted(evidence: Evidence) -> bool:
    """Whether the scenario expects a preflight."""
    return any(fault.expect.preflight for fault in evidence.cell.scenario.faults)


def rejoins(evidence: Evidence) -> Finding:
    """The place of each occurrence of a fault with ``expect.preflight`` was checked, and found as
    expected. No process started there while it was checked, nor after if it was unfit; at least one
    did after if it was fit. What cannot be measured on a machine is inconclusive.
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
    if problems:
        return failed(some(problems))
    if missing:
        return unknown(some(missing))
    return passed(some(met) or "no preflight was due")


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
    if early:
        return True, f"{early[0].data['process']} started on {_said(spot)} before it was checked"
    if found == "unfit":
        return bool(later), f"{said}, and {_names(later)} there later"
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


def _started(evidence: Evidence, spot: tuple[int, str]) -> list[Event]:
    return [event for event in evidence.log.of(Kind.PROCESS_SPAWNED) if _spot(event) == spot]


def _spot(event: Event) -> tuple[int, str]:
    return int(event.data["node"]), str(event.data["device"])


def _said(spot: tuple[int, str]) -> str:
    return f"{spot[1]} of node {spot[0]}"


def _names(started: list[Event]) -> str:
    names = ", ".join(str(event.data["process"]) for event in started)
    return f"{names} started" if names else "no process started"
