"""Whether checkpoints were restored, refused and deleted only as allowed, and commits kept, and
written only by the members in charge.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, passed, some, unknown, verdict_of
from trainchaos.harness.judge.record.history import Generation, History, StepRun
from trainchaos.harness.judge.record.kept_in_memory import PLACE, held_in_memory
from trainchaos.harness.judge.record.split import KEEPING, agreed_before, diverged, doubtful
from trainchaos.harness.judge.results import Finding
from trainchaos.recovery.checkpoint.memory.header import is_memory
from trainchaos.recovery.policy.interval import steps_of

_KNOWN_SINCE = (
    *(Kind.CHECKPOINT_COMMITTED, Kind.CHECKPOINT_REFUSED),
    *(Kind.CHECKPOINT_SET_ASIDE, Kind.CHECKPOINT_DELETED),
)
"""Events after which a damaged checkpoint is replaced, known to be bad, or gone."""
_CONCERNS = (
    *(*_KNOWN_SINCE, Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_FAILED),
    *(Kind.FAULT_INJECTED, Kind.GENERATION_READY),
)


def checkpoint_integrity(evidence: Evidence) -> Finding:
    """A corrupt or doubtful checkpoint is never restored; every restored one was committed before.
    The last good one and the newest that the replicas agreed on are not deleted, and at least
    ``keep`` are left. A save that is due begins, and one that fails ends no rank.
    """
    custody = _Custody(evidence=evidence, agreements=_agreements(evidence))
    for event in evidence.log.of(*_CONCERNS):
        custody.see(event)
    problems = [*custody.problems, *_ended_by_a_save(evidence), *_not_begun(evidence)]
    counts = custody.counts
    if not any(counts.values()) and not problems:
        return passed("nothing to check: no checkpoint was restored, refused or deleted")
    return verdict_of(problems, ", ".join(f"{count} {what}" for what, count in counts.items()))


@dataclass(kw_only=True)
class _Custody:
    """Which checkpoints exist as the log goes on, and what was done wrongly with them.

    ``saving``: not acknowledged (yet), with step and generation. A rank may die between saving and
    acknowledging; the name then stands for the new checkpoint, not for an older bad one.
    ``rotten``: damaged in place by a fault, not noticed yet. ``there``: on disk, good or bad, as
    far as the log shows. ``spoilt``: the last fault that hit each one.
    """

    evidence: Evidence
    agreements: list[tuple[int, tuple[int, int]]]
    good: dict[str, int] = field(default_factory=dict)
    saving: dict[str, tuple[int, int]] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    rotten: dict[str, int] = field(default_factory=dict)
    spoilt: dict[str, Event] = field(default_factory=dict)
    saved_in: dict[str, int] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(
        default_factory=lambda: {"restored": 0, "refused": 0, "deleted": 0, "set aside": 0}
    )
    problems: list[str] = field(default_factory=list)

    def see(self, event: Event) -> None:
        """Take the next event into account."""
        name = str(event.data.get("checkpoint") or "")
        if event.kind in _KNOWN_SINCE:
            self.rotten.pop(name, None)
        if event.kind is Kind.CHECKPOINT_SAVING:
            self.saving[name] = event.step or 0, event.generation
            self.there.add(name)
        elif event.kind is Kind.CHECKPOINT_FAILED:
            self.saving.pop(name, None)
        elif event.kind is Kind.CHECKPOINT_COMMITTED:
            self.there.add(name)
            self.good[name], _ = self.saving.pop(name, (event.step or 0, 0))
            self.saved_in[name] = event.generation
            self.bad.discard(name)
        elif event.kind is Kind.FAULT_INJECTED and (event.data["target"] or {}).get("checkpoint"):
            self._corrupt(event)
        elif event.kind is Kind.CHECKPOINT_REFUSED:
            self._distrust(name, "refused")
        elif event.kind is Kind.CHECKPOINT_SET_ASIDE:
            self.there.discard(name)
            self._distrust(name, "set aside")
        elif event.kind is Kind.CHECKPOINT_DELETED:
            self._delete(event, name)
        elif event.kind is Kind.GENERATION_READY and name:
            self._restore(event, name)

    def _distrust(self, name: str, how: str) -> None:
        self.counts[how] += 1
        self.good.pop(name, None)
        self.saving.pop(name, None)
        self.bad.add(name)

    def _delete(self, event: Event, name: str) -> None:
        self.counts["deleted"] += 1
        for other in event.data.get("left", ()):
            self._was_saved(other)
        step, history = self.good.pop(name, None), self.evidence.history
        doubted = step is not None and doubtful(history, event, step, self.saved_in.get(name, 0))
        if not doubted and (why := self._why_kept(event, name, step)):
            self.problems.append(f"{name} was deleted though {why}")
        self.there.discard(name)

    def _why_kept(self, event: Event, name: str, step: int | None) -> str:
        """Why a checkpoint should not have been deleted. A ``rotten`` one that the replicas agreed
        on still counts as left, because the deleting rank cannot know of the damage: it only has to
        verify one of the checkpoints that stay.
        """
        left = [other for other in self.good if not is_memory(other)]
        if step is not None and not left:
            return "no other good checkpoint was left"
        if is_memory(name):
            return ""
        there = [*(self.good[other] for other in left), *self.rotten.values()]
        agreed = _agreed_by(event, self.agreements, self.evidence)
        if step is not None and all(
            step <= one and not any(other <= one for other in there) for one in agreed
        ):
            return "the replicas had agreed on no other that was left"
        keep = self.evidence.cell.scenario.workload.checkpoint.keep
        others = sum(not is_memory(other) for other in self.there - {name})
        if name not in self.there or others >= keep:
            return ""  # a checkpoint that was set aside has another name
        return f"{others} others were left, and {keep} are to be kept"

    def _restore(self, ready: Event, name: str) -> None:
        self.counts["restored"] += 1
        self._was_saved(name)
        number, resumed, step = ready.generation, ready.data["resume_step"], self.good.get(name)
        hit = self.spoilt.get(name)
        early = name in self.rotten and hit and _began_before(self.evidence, ready, hit)
        if early:
            step = self.rotten[name]
        saved_in = self.saved_in.get(name, 0)
        if (name in self.bad and not early) or (
            step is not None and _distrusted(self.evidence, ready, step, saved_in)
        ):
            why = f"generation {number} restored {name}, which is corrupt or doubtful"
        elif step is None:
            why = f"generation {number} restored {name}, which was never committed"
        elif step != resumed:
            why = f"{name} holds step {step}, resumed at {resumed}"
        else:
            return
        self.problems.append(why)

    def _was_saved(self, name: str) -> None:
        """One whose save began, and that is there: its saver died before it said so."""
        if name in self.saving:
            self.good[name], self.saved_in[name] = self.saving.pop(name)
            self.bad.discard(name)

    def _corrupt(self, event: Event) -> None:
        """Record a checkpoint fault that landed."""
        key = (event.data["fault"], event.data["occurrence"])
        for episode in self.evidence.measures.episodes:
            if (episode.fault, episode.occurrence) == key and episode.landed:
                name = event.data["target"]["checkpoint"]
                self.spoilt[name] = event
                if name in self.good:
                    self.rotten[name] = self.good.pop(name)
                self.saving.pop(name, None)
                self.bad.add(name)


def _agreements(evidence: Evidence) -> list[tuple[int, tuple[int, int]]]:
    """Each agreement of the replicas: its time, and the step as a lower and an upper bound.

    Where all replicas restored one checkpoint, they also agree on its step, which may be before or
    after the last comparison. They were compared while they held that state, so a difference found
    later cannot be older. It is enough to keep the newest checkpoint at or before either step.
    """
    found: list[tuple[int, tuple[int, int]]] = []
    for event in evidence.log.of(Kind.REPLICAS_AGREED, Kind.GENERATION_READY):
        if event.kind is Kind.REPLICAS_AGREED:
            found.append((event.time_ns, (event.step or 0, event.step or 0)))
        elif event.data["checkpoint"] and found:
            began = event.data["resume_step"]
            found.append((event.time_ns, (min(found[-1][1][0], began), began)))
    return found


def _agreed_by(
    event: Event, agreements: list[tuple[int, tuple[int, int]]], evidence: Evidence
) -> tuple[int, int]:
    """Steps of the last agreement that the event's actor may have known of; -1: there was none."""
    until_ns = event.time_ns + evidence.log.clocks.bound_ns(event)
    place = bisect.bisect_right(agreements, until_ns, key=itemgetter(0))
    return agreements[place - 1][1] if place else (-1, -1)


def _distrusted(evidence: Evidence, ready: Event, step: int, saved_in: int) -> bool:
    """Whether a checkpoint was saved after the last agreement before replicas were found to differ.

    A checkpoint that all restored counts as an agreement. After a takeover the answer is no: what
    the new coordinator knew is not in the log.
    """
    history = evidence.history
    if history.log.first(Kind.COORDINATOR_ADOPTED) is not None:
        return False
    for failure in diverged(history):
        if failure.generation >= ready.generation or saved_in > failure.generation:
            continue
        one = [
            e.data["resume_step"]
            for e in history.log.of(Kind.GENERATION_READY)
            if e.generation <= failure.generation and e.data["checkpoint"]
        ]
        if step > max(agreed_before(history, failure)[0], *one, 0):
            return True
    return False


def _began_before(evidence: Evidence, ready: Event, hit: Event) -> bool:
    """Whether all readers of a checkpoint may have read it before it was ``hit``: they start when
    the group has formed, and the log does not say when they had the last byte.
    """
    log = evidence.log
    formed = {
        e.actor: e.time_ns - log.clocks.bound_ns(e)
        for e in log.of(Kind.GROUP_FORMED)
        if e.generation == ready.generation
    }
    readers = [
        e.actor
        for e in log.of(Kind.STATE_READY)
        if e.generation == ready.generation and e.data["origin"] == "checkpoint"
    ]
    return bool(readers) and all(formed.get(name, hit.time_ns) < hit.time_ns for name in readers)


def _ended_by_a_save(evidence: Evidence) -> Iterator[str]:
    """Ranks whose error follows directly on a failed save."""
    if evidence.log.first(Kind.CHECKPOINT_FAILED) is None:
        return
    for name, log in evidence.log.actors.items():
        for event, following in itertools.pairwise(log.events):
            if event.kind is Kind.CHECKPOINT_FAILED and following.kind is Kind.ERROR_RAISED:
                yield f"{name} ended because {event.data['checkpoint']} could not be saved"


def _not_begun(evidence: Evidence) -> Iterator[str]:
    """Saves that were due after a step, and that a rank went on without: the first rank's on disk
    (but for async saves, which a busy disk postpones), those in memory of the first replica.
    """
    history, spec = evidence.history, evidence.cell.scenario.workload.checkpoint
    started = history.log.first(Kind.RUN_STARTED)
    every = started.data.get("checkpoint_every") if started and spec.mode != "async" else None
    on_disk = steps_of(every or "")
    in_memory = spec.in_memory.steps if spec.in_memory is not None else None
    begun = {
        (is_memory(str(e.data["checkpoint"])), e.actor, e.generation, e.step)
        for e in history.log.of(Kind.CHECKPOINT_SAVING)
    }
    for run in history.runs:
        generation = history.generation(run.generation)
        members = generation.members if generation is not None else ()
        for every_steps, memory, savers, lacks in (
            (on_disk, False, members[:1], "no checkpoint of it was begun"),
            (in_memory, True, members[: history.shards], "began no save of it in memory"),
        ):
            due = every_steps and not run.step % every_steps
            for name in sorted({*savers} & _went_on(history, run)) if due else ():
                if (memory, name, run.generation, run.step) not in begun:
                    yield f"{name} committed step {run.step}, and {lacks}"


def _went_on(history: History, run: StepRun) -> set[str]:
    """Ranks that made a step, and went on past the save after it."""
    later = history.run_of(run.generation, run.step + 1)
    if later is not None:
        return {*run.taken.actors} & {*later.taken.actors}
    if run.step < history.info.steps or history.outcome != "completed":
        return set()
    ended = {name for name, log in history.log.actors.items() if log.ended}
    return {*run.taken.actors} & {*run.done.actors} & ended


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
