"""Whether commits and checkpoints were kept, and written only by the members in charge."""

from __future__ import annotations

import math
from itertools import pairwise

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, passed, some, unknown, verdict_of
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.harness.judge.record.kept_in_memory import PLACE, held_in_memory
from trainchaos.harness.judge.record.split import KEEPING, agreed_before, diverged
from trainchaos.harness.judge.results import Finding


def no_lost_commit(evidence: Evidence) -> Finding:
    """No generation resumes before an acknowledged step.

    A generation that restores resumes at or after the newest acknowledged checkpoint that was not
    proved corrupt. If none is left, the job ends: a job that has saved never starts from scratch. A
    generation whose members keep their state, or copy it from peers, resumes at or after the last
    step that the whole job had committed.
    """
    history = evidence.history
    later = history.worked[1:]
    if not later:
        return passed("nothing to check: no generation followed the first")
    problems = []
    for generation in later:
        resume = generation.resume_step or 0
        restored = _restored(history, generation)
        if restored is None:
            due, what = _job_step(history, generation), "the job had committed step"
        else:
            due, what = (
                _acknowledged(history, restored),
                "a good checkpoint was acknowledged at step",
            )
        if resume < due:
            problems.append(
                f"generation {generation.number} resumed at step {resume}, but {what} {due}"
            )
        elif restored is not None and not resume and (saved := _ever_saved(history, restored)):
            problems.append(
                f"generation {generation.number} began anew, though {saved} had been saved"
            )
    resumed = ", ".join(str(generation.resume_step) for generation in later)
    return verdict_of(
        problems,
        f"{len(later)} generations resumed at step {resumed}; nothing acknowledged was lost",
    )


def _restored(history: History, generation: Generation) -> Generation | None:
    """The generation whose restore or fresh start a generation's state comes from; None: neither.

    It is the generation itself, unless its state comes from peers. Then it is a generation since
    the last that worked, lost after members of both had taken their state, or had parked with an
    earlier one than the job's (one that restored may be lost before its peers have a copy, and
    reports no state then); or lost when all remaining members have joined since and have no state.
    """
    if generation.state not in KEEPING:
        return generation
    members = set(generation.members)
    last = max((o for o in history.worked if o.number < generation.number), key=lambda o: o.number)
    come_since = not generation.resume_step and not members & set(last.members)
    step = _job_step(history, generation)
    stated = {
        (event.generation, event.actor)
        for event in history.log.of(Kind.STATE_READY, Kind.PARKED)
        if event.kind is Kind.STATE_READY or (event.data["valid"] and (event.step or 0) < step)
    }
    for other in reversed(history.generations):
        between = last.number < other.number < generation.number and other.state not in KEEPING
        theirs = any((other.number, member) in stated for member in members)
        if between and (theirs or (come_since and members & set(other.members))):
            return other
    return None


def _ever_saved(history: History, generation: Generation) -> str:
    """An acknowledged checkpoint on disk from before a generation; "": there was none, or a
    coordinator that took over may not know of it.
    """
    if any(e.time_ns < generation.started_ns for e in history.log.of(Kind.COORDINATOR_ADOPTED)):
        return ""
    saved = (
        str(e.data["checkpoint"])
        for e in history.log.of(Kind.CHECKPOINT_COMMITTED)
        if e.data.get("place") != PLACE
        and e.generation < generation.number
        and e.time_ns < generation.started_ns
    )
    return max(saved, default="")


def _job_step(history: History, generation: Generation) -> int:
    """Highest step that all members of the previous generation had committed."""
    earlier = [g for g in history.worked if g.number < generation.number]
    runs = history.runs_of(earlier[-1].number) if earlier else []
    done = [run.step for run in runs if {*run.done.actors} >= {*earlier[-1].members}]
    return max([*done, earlier[-1].resume_step or 0] if earlier else [0])


def _acknowledged(history: History, generation: Generation) -> int:
    """Step of the newest checkpoint that was acknowledged before the generation had its state, was
    still kept, was not proved corrupt, and is not in doubt through a divergence found since.
    """
    until = generation.ready_ns or generation.started_ns
    known: dict[str, int] = {}
    for event in history.log.of(
        Kind.CHECKPOINT_COMMITTED,
        Kind.CHECKPOINT_REFUSED,
        Kind.CHECKPOINT_DELETED,
        Kind.CHECKPOINT_SET_ASIDE,
    ):
        if event.time_ns > until:
            break
        if event.data.get("place") == PLACE:
            continue
        if event.kind is not Kind.CHECKPOINT_COMMITTED:
            known.pop(event.data["checkpoint"], None)
        elif event.generation < generation.number:
            known[event.data["checkpoint"]] = event.step or 0
    number, started_ns = generation.number, generation.started_ns
    known |= held_in_memory(history, since_ns=started_ns, until_ns=until, before=number)
    sure = math.inf  # after a divergence the last agreement, until a later generation saves
    split = [f for f in diverged(history) if f.generation < number and f.time_ns < started_ns]
    latest = max(split, key=lambda failure: failure.time_ns, default=None)
    if latest and not any(latest.generation < one.number < number for one in history.worked):
        sure = agreed_before(history, latest)[0]
    return max((step for step in known.values() if step <= sure), default=0)


def single_writer(evidence: Evidence) -> Finding:
    """A fenced generation, a resumed zombie or a process that is not a member commits nothing, each
    rank has one writer, and each generation a number above those before: fencing goes by it.
    """
    history = evidence.history
    problems = [
        f"{event.actor} committed step {event.step} for generation {event.generation} without the"
        " right to"
        for event in history.foreign
    ]
    begun = [event.generation for event in history.log.of(Kind.GENERATION_STARTED)]
    problems += [
        f"generation {later} began after generation {former}"
        for former, later in pairwise(begun)
        if later <= former
    ]
    for event in history.log.of(Kind.CHECKPOINT_COMMITTED):
        generation = history.generation(event.generation)
        fenced = generation.fenced_ns if generation else None
        sure_ns = event.time_ns - history.log.clocks.bound_ns(event)
        if generation is None or (fenced is not None and sure_ns > fenced):
            problems.append(
                f"{event.actor} wrote {event.data['checkpoint']} for fenced generation"
                f" {event.generation}"
            )
    for run in history.runs:
        ranks = run.done.said["rank"]
        if len(set(ranks)) < len(ranks):
            problems.append(
                f"step {run.step} of generation {run.generation} was committed twice by one rank"
            )
    problems += _after_parking(history)
    if history.unsure and not problems:
        who = [
            f"{e.actor} committed step {e.step} of generation {e.generation}"
            for e in history.unsure
        ]
        bound_ms = history.log.clock_bound_s * 1e3
        return unknown(
            f"{some(who)}, so near its end that clocks right to within {bound_ms:.3f} ms cannot"
            " order them"
        )
    return verdict_of(
        problems,
        f"{sum(len(r.commits) for r in history.runs)} commits, each by the member in charge",
    )


def _after_parking(history: History) -> list[str]:
    parked: dict[tuple[str, int], Event] = {}
    problems: list[str] = []
    if history.log.first(Kind.PARKED) is None:
        return problems
    for event in history.log.of(Kind.PARKED, Kind.STEP_COMMITTED):
        key = (event.actor, event.generation)
        if event.kind is Kind.PARKED:
            parked.setdefault(key, event)
        elif key in parked and event.time_ns > parked[key].time_ns and event not in history.foreign:
            problems.append(f"{event.actor} committed step {event.step} after it had parked")
    return problems
