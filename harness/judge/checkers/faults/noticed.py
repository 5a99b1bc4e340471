"""Whether each fault fired and landed, and whether the system detected and blamed it correctly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.checkers.faults.due import all_declined, excused, shortfall
from trainchaos.harness.judge.evidence.evidence import (
    Evidence,
    passed,
    some,
    unknown,
    verdict_of,
)
from trainchaos.harness.judge.measure.incidents import acts_of, recovery_of
from trainchaos.harness.judge.record.commands import follows
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
    fired = [episode for episode in evidence.measures.episodes if episode.injected]
    if evidence.is_control:
        hit = [f"{episode.fault} was injected into the control arm" for episode in fired]
        return verdict_of(hit, "nothing to check: the control arm has no faults")
    faults = evidence.cell.scenario.faults
    if not faults:
        return passed("nothing to check: the scenario has no faults")
    times = Counter(episode.fault for episode in fired)
    missing = [lacks for fault in faults if (lacks := shortfall(evidence, fault, times[fault.id]))]
    if all_declined(evidence):
        missing.append(
            "no fault fired: their probabilities ruled all of them out; use another seed"
        )
    for episode in fired:
        if not excused(evidence, episode) and (why := _not_shown(evidence, episode)):
            missing.append(f"{episode.fault} (occurrence {episode.occurrence}) {why}")
    seen = [
        f"{e.fault}: seen by {e.landed.data['witness']}{_lateness(e, ',')}"
        for e in fired
        if e.landed
    ]
    return verdict_of([], some(seen), missing)


def _not_shown(evidence: Evidence, episode: Episode) -> str:
    """Why a fault that fired is not known to have landed as planned."""
    if episode.failed:
        return f"could not be injected: {episode.failed.data['reason']}"
    if episode.landed is None:
        return "was injected, but no witness saw it land"
    if episode.landed.data["witness"] in (None, "", "injector"):
        return "has no witness but its injector"
    missed = episode.injected is not None and episode.injected.data.get("missed")
    return f"acted{_lateness(episode)}" if missed and not evidence.history.info.observed else ""


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
    found = (_alone if evidence.is_control else _of_faults)(evidence, failures)
    if found.verdict == "fail" or not outside:
        return found
    why = [
        f"node {loss.data['node']} was lost, by no fault of the scenario: {loss.data['why']}"
        for loss, _ in losses
    ]
    return unknown(some(why))


def _alone(evidence: Evidence, failures: list[Event]) -> Finding:
    """Of a control arm."""
    exits = [event for event in failures if event.data["cause"] == "exit"] or (
        failures if evidence.history.unfinished else []
    )
    if exits and evidence.history.info.observed:
        return unknown(
            f"the command fails without any fault: {_describe(exits[0])}, {exits[0].data['detail']}"
        )
    wrong = [f"false alarm: {_describe(event)}" for event in failures]
    wrong += [*lost_keepers(evidence.log, ()), *_undeclared(evidence)]
    return verdict_of(wrong, "no failure was declared in the control arm")


def _of_faults(evidence: Evidence, failures: list[Event]) -> Finding:
    episodes = evidence.measures.episodes
    lost = lost_keepers(evidence.log, episodes)
    problems = [f"{one}, and no fault explains it" for one in lost]
    problems += [*_undeclared(evidence), *_hasty(failures), *_uncounted(evidence)]
    claimed = {id(failure): e for e in episodes for failure in e.failures}
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
    for hits in acts_of(evidence.history, episodes):
        fault = evidence.fault(hits[0].fault)
        due = fault.expect.detected_by if fault else None
        # of several at once, the answer to the first may have ended the others
        seen = any(hit.failure is not None for hit in hits)
        if due and not seen and any(hit.landed for hit in hits):
            problems.append(
                f"{hits[0].fault} should have been detected as {due}, and was not detected at all"
            )
    if not failures and not problems:
        return passed("no failure was declared and none was due")
    return verdict_of(problems, some([_describe(event) for event in failures]))


def _undeclared(evidence: Evidence) -> list[str]:
    """Ends of processes that nobody asked for, and that no failure declares."""
    history, log = evidence.history, evidence.log
    if history.info.observed or history.outcome not in ("completed", "gave-up"):
        return []
    failures = log.of(Kind.FAILURE_DETECTED)
    declared = {e.data["process"] for e in failures if e.data["cause"] == "exit"}
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


def _wrong_blame(evidence: Evidence, episode: Episode, event: Event) -> list[str]:
    history, episodes = evidence.history, evidence.measures.episodes
    generation = history.generation_at(event.time_ns)
    members = generation.members if generation else ()
    cause, named = event.data["cause"], event.data["process"]
    values = cause in ("diverged", "nonfinite")
    changed = changed_by(history, episodes, event) if values else ()
    if cause == "diverged" and outvoted(changed, generation, named):
        return []
    hit = named if episode.may_be_blamed(event) or named in changed else episode.process
    rank = members.index(hit) if hit in members else None
    unblamed = named is None and _may_be_nameless(evidence, episode, event, generation)
    problems = []
    if hit is not None and named != hit and not unblamed:
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


def _may_be_nameless(
    evidence: Evidence, episode: Episode, event: Event, generation: Generation | None
) -> bool:
    """Whether no process can be named: of a command; where replicas differ without a majority; of a
    rank that works and only appears to be stalled, as one that waits for bytes looks the same; of
    values that were finite and only too large for the norm over all ranks; where all members, or
    exactly half of them, were hit in the same step, so that neither side is the odd one out; and
    where a collective failed after whole replicas were hit, so that no rank lags behind the others
    of its replica.
    """
    cause = event.data["cause"]
    finite = bool(episode.planted) and all(map(math.isfinite, episode.planted))
    if evidence.history.info.observed or cause == "diverged" or episode.seems_still:
        return True
    if cause == "nonfinite" and finite:
        return True
    members = generation.members if generation else ()
    at = (episode.injected.generation, episode.injected.step) if episode.injected else None
    together: dict[str, set[str]] = {episode.kind: set()}  # by each kind that breaks ranks
    for other in evidence.measures.episodes:
        breaks = other.kind == episode.kind or not (other.harmless or other.corrupts)
        if breaks and other.injected and (other.injected.generation, other.injected.step) == at:
            together.setdefault(other.kind, set()).update({*other.processes} & {*members})
    for hit in together.values():
        if len(members) > 1 and 2 * len(hit) in (len(members), 2 * len(members)):
            return True
        if cause == "error" and generation and generation.shards > 1 and hit:
            replicas = {members.index(name) // generation.shards for name in hit}
            if len(hit) == len(replicas) * generation.shards:
                return True
    return False


def expectations(evidence: Evidence) -> Finding:
    """Every incident ended as its fault's ``expect.outcome`` says, or as one of them, and was
    blamed as ``expect.blame`` says.
    """
    if evidence.is_control:
        return passed("nothing to check: the control arm has no faults")
    problems, missing, met = [*_blame(evidence)], [], []
    for incident in evidence.measures.incidents:
        fault, ended = evidence.fault(incident.fault), incident.outcome
        accepted = fault.expect.outcomes if fault else []
        if not accepted:
            continue
        due = " or ".join(accepted)
        if ended == "not-landed" or not incident.landed:
            missing.append(f"{incident.fault} never landed, so whether it ends {due} is not known")
        if ended == "not-landed":
            continue
        alone = evidence.control is None and not incident.detected_by
        if ended == "hang" and "hang" not in accepted and evidence.history.cut_short:
            missing.append(f"the arm was cut short before {incident.fault} could end {due}")
        elif {*accepted} <= {"masked", "sdc-escape"} and alone:
            missing.append(f"{incident.fault}: {due} is judged by a control arm, and there is none")
        elif ended not in accepted:
            problems.append(f"{incident.fault} was expected to end {due}, and ended {ended}")
        else:
            met.append(f"{incident.fault}: {ended}")
    return verdict_of(problems, some(met) or "nothing to check: no outcome is expected", missing)


def _blame(evidence: Evidence) -> Iterator[str]:
    """Violations of ``expect.blame``: the rank that was hit was not blamed, or a process was blamed
    where none should be.
    """
    for episode in evidence.measures.episodes:
        fault, failure, hit = evidence.fault(episode.fault), episode.failure, episode.processes
        due = fault.expect.blame if fault and episode.landed else None
        if due == "none" and failure is not None:
            yield f"{episode.fault} should be blamed on no process, but {_describe(failure)} was"
        if due == "rank" and failure is None:
            yield f"{episode.fault} should be blamed on the rank it hit, and none was"
        if due == "rank" and failure is not None and hit and failure.data["process"] not in hit:
            yield f"{episode.fault} hit {', '.join(hit)}, and {_describe(failure)} was blamed"
