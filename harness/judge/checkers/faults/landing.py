"""Whether faults really landed, re-derived from what actors other than the injector wrote.

Every injected occurrence is logged as landed or failed; a failed one must have left no evidence. A
landed one has to pass two questions. Does the log up to the landing contain evidence of it (found
by the fault's own pure ``landed``), and is that the evidence that was stated? Did the necessary
consequences follow (``Fault.follows``, ``chaos.fault.aftermath``)? A log that answers no
contradicts itself. If the evidence was lost with a machine's last lines, or predates what is asked
of it, the answer is inconclusive.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, Event
from trainchaos.chaos.fault.aftermath import LANDED_OTHERWISE, Aftermath, Breach
from trainchaos.chaos.fault.base import Fault, Landed, Occurrence, Where
from trainchaos.chaos.fault.build import build
from trainchaos.chaos.plugins import FAULTS, load
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, some, unknown
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.kept_in_memory import keepers
from trainchaos.harness.judge.record.lost_node_evidence import silenced
from trainchaos.harness.judge.results import Finding

NUMBERS = ("signal", "exit_code", "reaped_signal")
"""Numbers that identify something. Other numbers are measurements, which a late line may change."""

READ_LATE_NS = 1_000_000_000
"""How far the reader of a process's log may lag behind the process."""


def _kinds() -> Mapping[str, type[Fault]]:
    return load(FAULTS, Fault)


def landing(evidence: Evidence) -> Finding:
    """Every landed fault has matching evidence from other actors, and its necessary consequences
    followed: a killed process ended by that signal and wrote nothing more, a stopped one stood
    still.
    """
    if evidence.is_control or not evidence.cell.scenario.faults:
        return passed("nothing to check: no fault")
    wrong: list[str] = []
    lacking: list[str] = []
    count = 0
    for episode in evidence.measures.episodes:
        fault = _fault(evidence, episode)
        if fault is None or episode.injected is None:
            continue
        count += episode.landed is not None
        judge = _failed_breaches if episode.landed is None else _breaches
        for breach in judge(evidence, episode, fault):
            name = f"{episode.fault} (occurrence {episode.occurrence})"
            (wrong if breach.sure else lacking).append(f"{name}: {breach.text}")
    if wrong:
        return failed(some(wrong))
    if lacking:
        return unknown(some(lacking))
    return passed(
        f"{count} derived again from the log" if count else "nothing to check: no fault landed"
    )


def _fault(evidence: Evidence, episode: Episode) -> Fault | None:
    spec, kind = evidence.fault(episode.fault), _kinds().get(episode.kind)
    if spec is None or kind is None or spec.kind != episode.kind:
        return None  # the log is of another plan; ``identity`` reports that
    return build(spec.kind, spec.params, _kinds())


def _breaches(evidence: Evidence, episode: Episode, fault: Fault) -> Iterator[Breach]:
    assert episode.injected is not None and episode.landed is not None
    occurrence = occurrence_of(episode)
    unheard = _missing_lines(evidence, occurrence)
    found = _landings(evidence, episode, fault, occurrence)
    if not found:
        text = (
            f"nothing in the log shows that it landed, as {episode.landed.data['witness']} is said"
            " to have seen"
        )
        yield Breach(
            text=f"{text}{unheard}",
            sure=not unheard and not evidence.log.clocks.bound_ns(episode.landed),
        )
    elif differs := min((_differs(episode.landed, one) for one in found), key=len):
        yield Breach(text=f"{differs}{unheard}", sure=not unheard)
    after = Aftermath(
        occurrence=occurrence,
        landed=episode.landed,
        healed=episode.healed,
        log=evidence.log,
        observed=evidence.history.info.observed,
    )
    for consequence in fault.follows():
        yield from consequence.breaches(after)


def _failed_breaches(evidence: Evidence, episode: Episode, fault: Fault) -> Iterator[Breach]:
    """What contradicts that an occurrence did not land."""
    assert episode.injected is not None
    log, occurrence = evidence.log, occurrence_of(episode)
    unheard = _missing_lines(evidence, occurrence)
    if episode.failed is None:
        if evidence.history.finished is not None:
            text = "the run ended, and it is neither said to have landed nor to have failed"
            yield Breach(text=f"{text}{unheard}", sure=not unheard)
        return
    reason = str(episode.failed.data["reason"])
    if reason.startswith(LANDED_OTHERWISE):
        return
    seen = list(_seen(evidence, occurrence, fault, episode.injected, episode.failed))
    found = fault.landed(occurrence, seen)
    if found is not None:
        # A process's lines are read from its file, and the reader may lag behind their times.
        early = [
            e
            for e in seen
            if e.actor == ORCHESTRATOR or episode.failed.time_ns - e.time_ns > READ_LATE_NS
        ]
        known = not unheard and not log.clocks.bound_ns(episode.failed)
        text = f"it is said to have failed ({reason}), and {found.witness} saw it land"
        yield Breach(text=text, sure=known and fault.landed(occurrence, early) is not None)


def occurrence_of(episode: Episode) -> Occurrence:
    """The occurrence as the injector saw it, rebuilt from what it logged before it acted."""
    assert episode.injected is not None
    injected, target = episode.injected, episode.target
    processes, rank = episode.processes, episode.rank
    ends = target.get("processes")
    if isinstance(ends, dict):  # processes of links, by rank
        links = target.get("links") or [[None]]
        rank = links[0][0]
        first = ends.get(str(rank))
        processes = tuple(
            name for name in (first, *(n for n in ends.values() if n != first)) if name
        )
    return Occurrence(
        fault=episode.fault,
        number=episode.occurrence,
        process=processes[0] if processes else None,
        rank=rank,
        processes=processes,
        checkpoint=target.get("checkpoint"),
        step=injected.step,
        target=target,
        time_ns=injected.time_ns,
    )


def _landings(
    evidence: Evidence, episode: Episode, fault: Fault, occurrence: Occurrence
) -> list[Landed]:
    """What the fault accepts as evidence in the log up to the logged landing. The act is also tried
    a little earlier and later, by the error of the clocks.
    """
    assert episode.landed is not None
    assert episode.injected is not None
    events = list(_seen(evidence, occurrence, fault, episode.injected, episode.landed))
    bound_ns = max(
        (evidence.log.clocks.bound_ns(e) for e in events if e.actor != ORCHESTRATOR), default=0
    )
    found = []
    for shift_ns in dict.fromkeys((0, -bound_ns, bound_ns)):
        one = fault.landed(replace(occurrence, time_ns=occurrence.time_ns + shift_ns), events)
        if one is not None:
            found.append(one)
    return found


def _seen(
    evidence: Evidence, occurrence: Occurrence, fault: Fault, injected: Event, verdict: Event
) -> Iterator[Event]:
    """Events that the injector could know when it logged ``verdict``: the coordinator's since the
    injection, and all lines of the processes that were hit.
    """
    log = evidence.log
    all_actors = fault.where is Where.COORDINATOR or fault.everywhere
    whose = log.actors if all_actors else {ORCHESTRATOR, *occurrence.processes}
    bound_ns = (lambda _: 0) if log.clocks.one else log.clocks.bound_ns
    known: list[Event] = []
    for actor in whose:
        lines = log.by(actor)
        if actor == ORCHESTRATOR:
            known += [event for event in lines if injected.seq <= event.seq < verdict.seq]
        else:
            known += [e for e in lines if e.time_ns - bound_ns(e) <= verdict.time_ns]
    known.sort(key=attrgetter("time_ns", "actor", "seq"))
    yield from known


def _missing_lines(evidence: Evidence, occurrence: Occurrence) -> str:
    """Why lines of the processes that were hit may be missing; "" if none are."""
    lost = silenced(evidence.log) & set(occurrence.processes)
    if lost:
        return f" (the last lines of {', '.join(sorted(lost))} were lost with the node)"
    without = keepers(evidence.log)  # they write none
    for name in (ORCHESTRATOR, *(each for each in occurrence.processes if each not in without)):
        log = evidence.log.actors.get(name)
        if log is None and not evidence.history.info.observed:
            return f" (there is no log of {name})"
        if log is not None and log.problems:
            return f" ({log.problems[0]})"
    return ""


def _differs(landed: Event, found: Landed) -> str:
    """Where the stated evidence differs from the log; "" if it does not."""
    stated = landed.data["evidence"]
    if landed.data["witness"] != found.witness:
        return (
            f"{landed.data['witness']} is said to have seen it, and the log has it from"
            f" {found.witness}"
        )
    for key, value in found.evidence.items():
        if not isinstance(stated, dict) or not _identifies(key, value):
            continue
        if _plain(stated.get(key)) != _plain(value):
            return f"{key} is said to be {stated.get(key)!r}, and the log shows {value!r}"
    return ""


def _identifies(key: str, value: Any) -> bool:
    """Whether a value identifies something, as opposed to a measurement."""
    return key in NUMBERS or not isinstance(value, (int, float))


def _plain(value: Any) -> str:
    """The value as a log writes it."""
    return json.dumps(value, sort_keys=True, default=str)
