"""What a scenario promises of a fault beside its outcome: the alarms of health detectors, and no
others; and that suspect places were checked before a process rejoined there, and kept out if unfit.
"""

from __future__ import annotations

import math

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.fault import FaultSpec
from trainchaos.harness.judge.evidence.evidence import Evidence, some, unknown, verdict_of
from trainchaos.harness.judge.measure.pressure import TOO_BUSY, others_of
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.episodes import AlarmRaised, alarms_of, steps_until
from trainchaos.harness.judge.record.history import NS
from trainchaos.harness.judge.results import Finding

OF_TIMES = frozenset({"straggler", "throughput-drop", "hang"})
"""Alarms that say that something takes long, which other programs on the machine cause too."""
IN_NOISE = frozenset({"straggler", "throughput-drop"})
"""Of these, alarms that are told from the noise of times: other programs may hide a fault in it."""


def alarms(evidence: Evidence) -> Finding:
    """Each occurrence of a fault with ``expect.alarm`` is followed by that alarm, of what it hit,
    within ``expect.alarm_within`` steps; and every alarm is of something that a fault had hit. In
    the control arm there is none. Where other programs used much of the machine, one that only says
    that something took long is inconclusive, and so is one that has to be told from their noise and
    is missing or late.
    """
    raised = alarms_of(evidence.history, () if evidence.is_control else evidence.measures.episodes)
    busy = others_of(evidence.log) is not None
    alien = [alarm for alarm in raised if not alarm.by]
    excused = [alarm for alarm in alien if busy and alarm.what in OF_TIMES]
    problems = [
        f"an alarm that no fault explains: {_alarm(alarm)}"
        for alarm in alien
        if alarm not in excused
    ]
    met: list[str] = []
    missing: list[str] = []
    hidden: list[str] = []
    for episode in () if evidence.is_control else evidence.measures.episodes:
        fault = evidence.fault(episode.fault)
        if fault is None or fault.expect.alarm is None or episode.injected is None:
            continue
        if episode.landed is None:
            missing.append(f"{fault.id} never landed, so that no alarm was due")
            continue
        said, well = _answered(evidence, fault, episode, raised)
        drowned = busy and fault.expect.alarm in IN_NOISE
        (met if well else hidden if drowned else problems).append(said)
    if not problems and (excused or hidden):
        names = ", ".join(dict.fromkeys(map(_alarm, excused)))
        said = f"an alarm says: {names}" if excused else some(hidden)
        return unknown(f"{TOO_BUSY}other programs used much of it, and {said}")
    return verdict_of(problems, some(met) or "no alarm was raised, and none was due", missing)


def _answered(
    evidence: Evidence, fault: FaultSpec, episode: Episode, raised: list[AlarmRaised]
) -> tuple[str, bool]:
    """What became of the alarm that one occurrence should raise, and whether that is right."""
    due, within = fault.expect.alarm, fault.expect.alarm_within
    mine = [one for one in raised if one.what == due and episode in one.by]
    if not mine:
        others = sorted({one.what for one in raised if episode in one.by})
        beside = f"; raised were: {', '.join(others)}" if others else ""
        return f"{fault.id} should have raised the alarm {due}, and did not{beside}", False
    steps = steps_until(evidence.history, episode, mine[0].event)
    if within is not None and steps > within:
        late = f"came {steps} steps after the fault, {within} are allowed"
        return f"{fault.id}: {_alarm(mine[0])} {late}", False
    return f"{fault.id}: {_alarm(mine[0])}, {steps} steps after the fault", True


def _alarm(alarm: AlarmRaised) -> str:
    return f"{alarm.what} of {alarm.place}"


_Spot = tuple[int, str]
"""A node, and a device of it."""
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
        hit = episode.processes
        spawned = evidence.log.of(Kind.PROCESS_SPAWNED)
        spots = [_spot(event) for event in spawned if event.data["process"] in hit]
        if not spots:
            missing.append(f"{fault.id} hit no process, so that no place was suspect")
        for spot in spots:
            since_ns, checks = episode.injected.time_ns, _of(evidence, spot, Kind.PLACE_CHECKED)
            checked = next((event for event in checks if event.time_ns > since_ns), None)
            if checked is None:
                problems.append(f"{fault.id}: {_place(spot)} was not checked")
            elif checked.data["fit"] is None:
                missing.append(f"{fault.id}: {_place(spot)}: {checked.data['said']}")
            else:
                wrong, said = _used(evidence, fault, spot, checked)
                (problems if wrong else met).append(f"{fault.id}: {said}")
    return verdict_of(problems, some(met) or "no preflight was due", missing)


def _used(evidence: Evidence, fault: FaultSpec, spot: _Spot, checked: Event) -> tuple[bool, str]:
    """Whether what became of a checked place is wrong, and what became of it."""
    found = _WORDS[checked.data["fit"]]
    said = f"{_place(spot)} is {found}"
    if found != fault.expect.preflight:
        return True, f"{said}, should be {fault.expect.preflight}: {checked.data['said']}"
    since_ns = checked.time_ns - round(checked.data["seconds"] * NS)
    started = [e for e in _of(evidence, spot, Kind.PROCESS_SPAWNED) if e.time_ns > since_ns]
    early = [event for event in started if event.time_ns < checked.time_ns]
    later = [event for event in started if event.time_ns >= checked.time_ns]
    for event in early if found == "fit" else started:
        if other := _other_place(evidence, spot, event.time_ns):
            when = "before it was checked" if event in early else f"though it is {found}"
            name = event.data["process"]
            return True, f"{name} started on {_place(spot)} {when}, and not on {_place(other)}"
    names = ", ".join(str(event.data["process"]) for event in later)
    what = f"{names} started" if names else "no process started"
    return found == "fit" and not later, f"{said}, and {what} there later"


def _of(evidence: Evidence, spot: _Spot, kind: Kind) -> list[Event]:
    return [event for event in evidence.log.of(kind) if _spot(event) == spot]


def _other_place(evidence: Evidence, spot: _Spot, at_ns: int) -> _Spot | None:
    """A place that could have been taken instead, of those that processes of this job ever had:
    its node is there, it was neither being checked nor found unfit, and, if it is a GPU, nobody has
    it.
    """
    exited = evidence.history.exited_ns
    for other in sorted({_spot(event) for event in evidence.log.of(Kind.PROCESS_SPAWNED)}):
        taken = other[1].startswith("cuda") and any(
            event.time_ns < at_ns < exited.get(event.data["process"], math.inf)
            for event in _of(evidence, other, Kind.PROCESS_SPAWNED)
        )
        suspect = any(
            event.time_ns - round(event.data["seconds"] * NS) <= at_ns
            and (at_ns < event.time_ns or event.data["fit"] is False)
            for event in _of(evidence, other, Kind.PLACE_CHECKED)
        )
        told = [
            event.kind
            for event in evidence.log.of(Kind.NODE_JOINED, Kind.NODE_LOST)
            if event.data["node"] == other[0] and event.time_ns < at_ns
        ]
        if other != spot and not (taken or suspect or told[-1:] == [Kind.NODE_LOST]):
            return other
    return None


def _spot(event: Event) -> _Spot:
    return int(event.data["node"]), str(event.data["device"])


def _place(spot: _Spot) -> str:
    return f"{spot[1]} of node {spot[0]}"
