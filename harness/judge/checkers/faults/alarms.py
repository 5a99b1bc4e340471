"""Whether the health detectors raised the alarms that a scenario expects, and no others."""

from __future__ import annotations

from trainchaos.chaos.scenario.fault import FaultSpec
from trainchaos.harness.judge.evidence.evidence import Evidence, some, unknown, verdict_of
from trainchaos.harness.judge.measure.pressure import TOO_BUSY, others_of
from trainchaos.harness.judge.record.alarms import AlarmRaised, alarms_of, steps_until
from trainchaos.harness.judge.record.episode import Episode
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
        f"an alarm that no fault explains: {_said(alarm)}"
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
        names = ", ".join(dict.fromkeys(map(_said, excused)))
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
        return (
            f"{fault.id}: {_said(mine[0])} came {steps} steps after the fault, {within} are allowed"
        ), False
    return f"{fault.id}: {_said(mine[0])}, {steps} steps after the fault", True


def _said(alarm: AlarmRaised) -> str:
    return f"{alarm.what} of {alarm.place}"
