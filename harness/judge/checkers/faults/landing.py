"""Whether faults really landed, re-derived from what actors other than the injector wrote.

Every injected occurrence is logged as landed or failed. A landed one has to pass two questions.
Does the log up to the landing contain evidence of it (found by the fault's own pure ``landed``)?
Did the necessary consequences follow (``Fault.follows``, ``chaos.fault.aftermath``)? A log that
answers no contradicts itself. If the evidence was lost with a machine's last lines, or predates
what is asked of it, the answer is inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from trainchaos.chaos.events.log import ORCHESTRATOR, Event
from trainchaos.chaos.fault.aftermath import Aftermath, Breach, Occurrence
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.fault.build import build
from trainchaos.chaos.plugins import FAULTS, load
from trainchaos.harness.judge.evidence.evidence import Evidence, passed, verdict_of
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.nodes import silenced
from trainchaos.harness.judge.results import Finding


def landing(evidence: Evidence) -> Finding:
    """Every landed fault has matching evidence from other actors, and its necessary consequences
    followed: a killed process ended by that signal and wrote nothing more, a stopped one stood
    still.
    """
    if evidence.is_control or not evidence.cell.scenario.faults:
        return passed("nothing to check: no fault")
    wrong: list[str] = []
    lacking: list[str] = []
    count, kinds = 0, load(FAULTS, Fault)
    for episode in evidence.measures.episodes:
        spec = evidence.fault(episode.fault)
        if spec is None or spec.kind not in kinds or spec.kind != episode.kind:
            continue  # the log is of another plan; ``identity`` reports that
        if episode.injected is None:
            continue
        count += episode.landed is not None
        for breach in _breaches(evidence, episode, build(spec.kind, spec.params, kinds)):
            name = f"{episode.fault} (occurrence {episode.occurrence})"
            (wrong if breach.sure else lacking).append(f"{name}: {breach.text}")
    shown = f"{count} derived again from the log" if count else "nothing to check: no fault landed"
    return verdict_of(wrong, shown, lacking)


def _breaches(evidence: Evidence, episode: Episode, fault: Fault) -> Iterator[Breach]:
    occurrence, landed = occurrence_of(episode), episode.landed
    if landed is None:
        if episode.failed is None and evidence.history.finished is not None:
            yield Breach(
                text="the run ended, and it is said neither to have landed nor to have failed"
            )
        return
    if not _shown(evidence, episode, fault, occurrence):
        lost = silenced(evidence.log) & set(occurrence.processes)
        why = f" (last lines of {', '.join(sorted(lost))} were lost with the node)" if lost else ""
        yield Breach(
            text="nothing in the log shows that it landed, as"
            f" {landed.data['witness']} is said to have seen{why}",
            sure=not lost and not evidence.log.clocks.bound_ns(landed),
        )
    after = Aftermath(
        occurrence=occurrence,
        landed=landed,
        healed=episode.healed,
        log=evidence.log,
        observed=evidence.history.info.observed,
    )
    for consequence in fault.follows():
        yield from consequence.breaches(after)


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


def _shown(evidence: Evidence, episode: Episode, fault: Fault, occurrence: Occurrence) -> bool:
    """Whether the fault accepts what the log has up to the landing as evidence. The act is also
    tried a little earlier and later, by the error of the clocks.
    """
    assert episode.landed is not None and episode.injected is not None
    events = _seen(evidence, occurrence, fault, episode.injected, episode.landed)
    bound_ns = max(
        (evidence.log.clocks.bound_ns(e) for e in events if e.actor != ORCHESTRATOR), default=0
    )
    return any(
        fault.landed(replace(occurrence, time_ns=occurrence.time_ns + shift_ns), events) is not None
        for shift_ns in dict.fromkeys((0, -bound_ns, bound_ns))
    )


def _seen(
    evidence: Evidence, occurrence: Occurrence, fault: Fault, injected: Event, verdict: Event
) -> list[Event]:
    """Events that the injector could know when it logged ``verdict``: the coordinator's since the
    injection, and all lines of the processes that were hit.
    """
    log = evidence.log
    all_actors = fault.where is Where.COORDINATOR or fault.everywhere
    whose = log.actors if all_actors else {ORCHESTRATOR, *occurrence.processes}
    bound_ns = (lambda _: 0) if log.clocks.one else log.clocks.bound_ns
    known = [
        event
        for actor in whose
        for event in log.by(actor)
        if (
            injected.seq <= event.seq < verdict.seq
            if actor == ORCHESTRATOR
            else event.time_ns - bound_ns(event) <= verdict.time_ns
        )
    ]
    return sorted(known, key=attrgetter("time_ns", "actor", "seq"))
