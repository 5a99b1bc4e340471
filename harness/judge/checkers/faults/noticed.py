"""Whether each fault fired and landed, and whether the system detected and blamed it correctly."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.checkers.faults.due import all_declined, excused, shortfall
from trainchaos.harness.judge.evidence.evidence import (
    Evidence,
    passed,
    some,
    unknown,
    verdict_of,
)
from trainchaos.harness.judge.measure.acts import acts_of
from trainchaos.harness.judge.measure.incidents import recovery_of
from trainchaos.harness.judge.record.command_end import follows
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import Generation
from trainchaos.harness.judge.record.kept_in_memory import keepers, lost_keepers
from trainchaos.harness.judge.record.nodes import taken_away
from trainchaos.harness.judge.record.split import changed_by, outvoted
from trainchaos.harness.judge.results import Finding


def fault_landed(evidence: Evidence) -> Finding:
    """Every planned fault fired as often as planned, and a witness other than the injector saw its
    effect.
    """
    episodes = evidence.measures.episodes
    fired = [episode for episode in episodes if episode.injected]
    if evidence.is_control:
        hit = [f"{episode.fault} was injected into the control arm" for episode in fired]
        return verdict_of(hit, "nothing to check: the control arm has no faults")
    if not evidence.cell.scenario.faults:
        return passed("nothing to check: the scenario has no faults")
    missing: list[str] = []
    for fault in evidence.cell.scenario.faults:
        mine = [episode for episode in fired if episode.fault == fault.id]
        if lacks := shortfall(evidence, fault, len(mine)):
            missing.append(lacks)
    if all_declined(evidence):
        missing.append(
            "no fault fired: their probabilities ruled all of them out; use another seed"
        )
    for episode in fired:
        name = f"{episode.fault} (occurrence {episode.occurrence})"
        if excused(evidence, episode):
            continue
        if episode.failed:
            missing.append(f"{name} could not be injected: {episode.failed.data['reason']}")
        elif episode.landed is None:
            missing.append(f"{name} was injected, but no witness saw it land")
        elif episode.landed.data["witness"] in (None, "", "injector"):
            missing.append(f"{name} has no witness but its injector")
        elif (
            episode.injected
            and episode.injected.data.get("missed")
            and not evidence.history.info.observed
        ):
            missing.append(f"{name} acted{_lateness(episode)}")
    seen = [
        f"{e.fault}: seen by {e.landed.data['witness']}{_lateness(e, ',')}"
        for e in fired
        if e.landed
    ]
    return verdict_of([], some(seen), missing)


def _lateness(episode: Episode, before: str = "") -> str:
    """How many steps later than planned the fault acted, and why; "" if it was on time."""
    steps = episode.injected.data.get("late_steps", 0) if episode.injected else 0
    if not steps or episode.injected is None:
        return ""
    return f"{before} {steps} step{'s' if steps > 1 else ''} late: {episode.injected.data['late']}"


def detection(evidence: Evidence) -> Finding:
    """Every declared failure blames a process that a fault hit, for the expected cause; and every
    end that nobody asked for is declared, and no silence before its limit. Without a fault there is
    no failure, and no checkpoint keeper ends. A node that was taken away, and by no
    fault, is neither a false alarm nor what was to be tested.
    """
    episodes = evidence.measures.episodes
    claimed = {failure.data["failure"] for e in episodes for failure in e.failures}
    losses = [
        (loss, numbers - claimed)
        for loss, numbers in taken_away(evidence.log, episodes)
        if numbers - claimed
    ]
    outside = {number for _, numbers in losses for number in numbers}
    failures = [
        e for e in evidence.log.of(Kind.FAILURE_DETECTED) if e.data["failure"] not in outside
    ]
    found = _detection(evidence, failures)
    if found.verdict == "fail" or not outside:
        return found
    return unknown(
        some(
            [
                f"node {loss.data['node']} was lost, by no fault of the scenario:"
                f" {loss.data['why']}"
                for loss, _ in losses
            ]
        )
    )


def _detection(evidence: Evidence, failures: list[Event]) -> Finding:
    if evidence.is_control:
        exits = [event for event in failures if event.data["cause"] == "exit"] or (
            failures if evidence.history.unfinished else []
        )
        if exits and evidence.history.info.observed:
            return unknown(
                f"the command fails without any fault: {_describe(exits[0])},"
                f" {exits[0].data['detail']}"
            )
        alarms = [f"false alarm: {_describe(event)}" for event in failures] + lost_keepers(
            evidence.log, ()
        )
        alarms += _undeclared(evidence)
        return verdict_of(alarms, "no failure was declared in the control arm")
    problems = [
        f"{one}, and no fault explains it"
        for one in lost_keepers(evidence.log, evidence.measures.episodes)
    ]
    problems += [*_undeclared(evidence), *_hasty(failures), *_uncounted(evidence)]
    claimed = {id(failure): e for e in evidence.measures.episodes for failure in e.failures}
    for event in failures:
        episode = claimed.get(id(event))
        if episode is None and _is_consequence(evidence, event, claimed):
            continue
        if episode is None:
            problems.append(
                f"a failure that no fault explains: {_describe(event)}, {event.data['detail']}"
            )
        elif not _follows(evidence, episode, event):
            problems += _wrong_blame(evidence, episode, event)
    for hits in acts_of(evidence.history, evidence.measures.episodes):
        episode = hits[0]
        fault = evidence.fault(episode.fault)
        due = fault.expect.detected_by if fault else None
        # of several at once, the answer to the first may have ended the others
        seen = any(hit.failure is not None for hit in hits)
        if due and not seen and any(hit.landed for hit in hits):
            problems.append(
                f"{episode.fault} should have been detected as {due}, and was not detected at all"
            )
    if not failures and not problems:
        return passed("no failure was declared and none was due")
    return verdict_of(problems, some([_describe(event) for event in failures]))


def _undeclared(evidence: Evidence) -> list[str]:
    """Ends of processes that nobody asked for, and that no failure declares."""
    history, log = evidence.history, evidence.log
    if history.info.observed or history.outcome not in ("completed", "gave-up"):
        return []
    declared = {
        e.data["process"] for e in log.of(Kind.FAILURE_DETECTED) if e.data["cause"] == "exit"
    }
    return [
        f"{e.data['process']} ended unasked, and no failure is said to be its exit"
        for e in log.of(Kind.PROCESS_EXITED)
        if not e.data["expected"] and e.data["process"] not in declared | keepers(log).keys()
    ]


def _uncounted(evidence: Evidence) -> list[str]:
    """Failures that are not numbered one after the other: a supervisor forgot some."""
    numbers = [e.data["failure"] for e in evidence.log.of(Kind.FAILURE_DETECTED)]
    if numbers == [*range(1, len(numbers) + 1)]:
        return []
    return [f"failures are numbered {', '.join(map(str, numbers))}"]


def _hasty(failures: list[Event]) -> list[str]:
    """Silences that were declared before they had lasted as long as their limit."""
    return [
        f"{_describe(e)} is declared silent after {e.data['silent_s']:.3f} s, the limit is"
        f" {e.data['limit_s']:.3f} s"
        for e in failures
        if e.data.get("silent_s", math.inf) < e.data.get("limit_s", 0.0)
    ]


def _follows(evidence: Evidence, episode: Episode, event: Event) -> bool:
    """Whether a survivor failed, which rightly blames a process that the fault did not hit."""
    if event.data["process"] in (None, *episode.processes):
        return False
    return any(follows(evidence.history, one, event) for one in episode.failures)


def _is_consequence(evidence: Evidence, event: Event, claimed: Mapping[int, Episode]) -> bool:
    """Whether a command's failure follows from one that a fault explains, as far as can be seen
    from outside.

    It does until the job has recovered from the first: the launcher kills the peers of a dead rank,
    which looks like a second failure, and may restart them on a checkpoint that cannot be read. It
    also does in a generation that started while the fault was active: a script that retries on a
    full disk fails again.
    """
    history = evidence.history
    if not history.info.observed:
        return False
    for earlier in evidence.log.of(Kind.FAILURE_DETECTED):
        if id(earlier) not in claimed:
            continue
        if earlier.generation == event.generation:
            return True  # in either order: one poll may have found both gone
        if earlier.time_ns <= event.time_ns:
            first = recovery_of(history, earlier).first_new
            if first is None or (first.committed_ns or 0) > event.time_ns:
                return True
    generation = history.generation(event.generation)
    return generation is not None and any(
        e.injected
        and e.failure
        and e.healed
        and e.injected.time_ns < generation.started_ns < e.healed.time_ns
        for e in evidence.measures.episodes
    )


def _describe(event: Event) -> str:
    process, rank = event.data["process"], event.data["rank"]
    blamed = "no process blamed" if process is None else f"{process} (rank {rank})"
    return f"{blamed}, cause {event.data['cause']}"


def _hit_together(evidence: Evidence, episode: Episode) -> list[set[str]]:
    """Processes that were hit in the same step and generation, for each kind of fault that breaks
    ranks: a stall may have been declared for any of these.
    """
    at = (episode.injected.generation, episode.injected.step) if episode.injected else None
    hit: dict[str, set[str]] = {episode.kind: set()}
    for other in evidence.measures.episodes:
        breaks = other.kind == episode.kind or not (other.harmless or other.corrupts)
        here = other.injected and (other.injected.generation, other.injected.step) == at
        if breaks and here:
            hit.setdefault(other.kind, set()).update(other.processes)
    return list(hit.values())


def _whole_replicas(struck: set[str], generation: Generation | None) -> bool:
    """Whether replicas span several ranks, and each replica that was hit was hit on all of them."""
    if generation is None or generation.shards == 1 or not struck:
        return False
    hit = {
        rank // generation.shards for rank, name in enumerate(generation.members) if name in struck
    }
    return len(struck) == len(hit) * generation.shards


def _wrong_blame(evidence: Evidence, episode: Episode, event: Event) -> list[str]:
    problems = []
    generation = evidence.history.generation_at(event.time_ns)
    members = generation.members if generation else ()
    cause, named = event.data["cause"], event.data["process"]
    changed = (
        changed_by(evidence.history, evidence.measures.episodes, event)
        if cause in ("diverged", "nonfinite")
        else ()
    )
    if cause == "diverged" and outvoted(changed, generation, named):
        return []
    hit = named if episode.may_be_blamed(event) or named in changed else episode.process
    rank = members.index(hit) if hit in members else None
    together = [struck & set(members) for struck in _hit_together(evidence, episode)]
    # No process can be named where replicas differ without a majority, or where all members or
    # exactly half of them were hit: neither side is the odd one out.
    odd = (len(members), 2 * len(members))
    alike = len(members) > 1 and any(2 * len(struck) in odd for struck in together)
    # The same where a collective failed after whole replicas were hit: no rank lags behind the
    # others of its replica.
    whole = cause == "error" and any(_whole_replicas(struck, generation) for struck in together)
    # The same for a rank that works and only appears to be stalled: a rank that is waiting for
    # bytes from others looks the same.
    still = episode.seems_still
    # The same for values that were finite and only too large for the norm over all ranks.
    finite = bool(episode.planted) and all(map(math.isfinite, episode.planted))
    sum_alone = cause == "nonfinite" and finite
    observed = evidence.history.info.observed
    nameless = observed or cause == "diverged" or alike or whole or still or sum_alone
    unblamed = nameless and event.data["process"] is None
    if hit is not None and event.data["process"] != hit and not unblamed:
        problems.append(f"{episode.fault} hit {hit}, but the blame fell on {_describe(event)}")
    elif rank is not None and event.data["rank"] not in (None, rank):
        problems.append(
            f"{episode.fault} hit rank {rank}, but the blame fell on {_describe(event)}"
        )
    fault = evidence.fault(episode.fault)
    due = fault.expect.detected_by if fault else None
    if due and event is episode.failure and cause != due:
        problems.append(f"{episode.fault} was detected as {cause}, expected {due}")
    return problems


def expectations(evidence: Evidence) -> Finding:
    """Every incident ended as its fault's ``expect.outcome`` says, or as one of them, and was
    blamed as ``expect.blame`` says.
    """
    if evidence.is_control:
        return passed("nothing to check: the control arm has no faults")
    problems, missing, met = _blame(evidence), [], []
    for incident in evidence.measures.incidents:
        fault = evidence.fault(incident.fault)
        accepted = fault.expect.outcomes if fault else []
        if not accepted:
            continue
        due = " or ".join(accepted)
        if incident.outcome == "not-landed" or not incident.landed:
            missing.append(f"{incident.fault} never landed, so whether it ends {due} is not known")
        if incident.outcome == "not-landed":
            continue
        if incident.outcome == "hang" and "hang" not in accepted and evidence.history.cut_short:
            missing.append(f"the arm was cut short before {incident.fault} could end {due}")
        elif (
            {*accepted} <= {"masked", "sdc-escape"}
            and evidence.control is None
            and not incident.detected_by
        ):
            missing.append(f"{incident.fault}: {due} is judged by a control arm, and there is none")
        elif incident.outcome not in accepted:
            problems.append(
                f"{incident.fault} was expected to end {due}, and ended {incident.outcome}"
            )
        else:
            met.append(f"{incident.fault}: {incident.outcome}")
    return verdict_of(problems, some(met) or "nothing to check: no outcome is expected", missing)


def _blame(evidence: Evidence) -> list[str]:
    """Violations of ``expect.blame``: the rank that was hit was not blamed, or a process was blamed
    where none should be.
    """
    problems = []
    for episode in evidence.measures.episodes:
        fault = evidence.fault(episode.fault)
        due = fault.expect.blame if fault and episode.landed else None
        failure = episode.failure
        if due == "none" and failure is not None:
            problems.append(
                f"{episode.fault} should be blamed on no process, but {_describe(failure)} was"
            )
        if due == "rank" and failure is None:
            problems.append(f"{episode.fault} should be blamed on the rank it hit, and none was")
        hit = episode.processes
        if due == "rank" and failure is not None and hit and failure.data["process"] not in hit:
            problems.append(
                f"{episode.fault} hit {', '.join(hit)}, and {_describe(failure)} was blamed"
            )
    return problems
