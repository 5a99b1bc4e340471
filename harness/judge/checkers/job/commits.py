"""Is what was committed kept, and written by those who may: commits and checkpoints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from chaos.events.log import Event, Kind
from harness.judge.evidence.evidence import Evidence, passed, some, unknown, verdict_of
from harness.judge.measure.incidents import diverged
from harness.judge.record.kept_in_memory import PLACE, held_in_memory
from harness.judge.record.lineage import Generation, History
from harness.judge.record.split import agreed_before
from harness.judge.results import Finding
from recovery.checkpoint.memory.header import is_memory

_KNOWN_SINCE = (
    Kind.CHECKPOINT_COMMITTED,
    Kind.CHECKPOINT_REFUSED,
    Kind.CHECKPOINT_SET_ASIDE,
    Kind.CHECKPOINT_DELETED,
)
"""What says of a checkpoint that it is another one, known to be bad, or gone."""


def no_lost_commit(evidence: Evidence) -> Finding:
    """No generation resumes before what was acknowledged.

    One that restores resumes at or after the newest acknowledged checkpoint that was not proved
    corrupt, and where none is left the job ends: nobody who has saved begins anew. One whose
    members keep their state, or copy it from each other, at or after the last step that the whole
    job had committed.
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
    """Whose restore, or beginning, a generation's state comes from: its own, or, where it is of
    peers, that of one since the last that worked, which was lost after members of both had taken
    their state, or of which all who are left have come since then and have none; None: of neither.
    """
    if generation.state not in ("peer", "kept"):
        return generation
    members = set(generation.members)
    last = max((o for o in history.worked if o.number < generation.number), key=lambda o: o.number)
    come_since = not generation.resume_step and not members & set(last.members)
    stated = {(event.generation, event.actor) for event in history.log.of(Kind.STATE_READY)}
    for other in reversed(history.generations):
        theirs = any((other.number, member) in stated for member in members) or (
            come_since and bool(members & set(other.members))
        )
        if (
            theirs
            and last.number < other.number < generation.number
            and other.state not in ("peer", "kept")
        ):
            return other
    return None


def _ever_saved(history: History, generation: Generation) -> str:
    """A checkpoint on disk that was acknowledged before a generation; "": none, or a coordinator
    may not know of it.
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
    """Highest step that all members of the generation before had committed."""
    earlier = [g for g in history.worked if g.number < generation.number]
    runs = history.runs_of(earlier[-1].number) if earlier else []
    done = [
        run.step
        for run in runs
        if {event.actor for event in run.commits} >= set(earlier[-1].members)
    ]
    return max([*done, earlier[-1].resume_step or 0] if earlier else [0])


def _acknowledged(history: History, generation: Generation) -> int:
    """Step of the newest checkpoint acknowledged before the generation's state was there, still
    kept, not proved corrupt, and not in doubt because replicas were found to differ since.
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
    known |= held_in_memory(
        history.log,
        since_ns=generation.started_ns,
        until_ns=until,
        before=generation.number,
        in_doubt=lambda gone, step, saved_in: _in_doubt(history, gone, step, saved_in),
    )
    sure = _sure_until(history, generation)
    return max((step for step in known.values() if step <= sure), default=0)


def _sure_until(history: History, generation: Generation) -> float:
    """The last step whose checkpoints were sure when a generation began: after a divergence, the
    step at which replicas last agreed before it; infinity: there was none. What a later generation
    saved is sure again.
    """
    broken = [
        failure
        for failure in diverged(history)
        if failure.generation < generation.number and failure.time_ns < generation.started_ns
    ]
    if not broken:
        return math.inf
    latest = max(broken, key=lambda failure: failure.time_ns)
    if any(latest.generation < other.number < generation.number for other in history.worked):
        return math.inf
    return agreed_before(history, latest)[0]


def single_writer(evidence: Evidence) -> Finding:
    """A fenced generation, a woken zombie or a stranger commits nothing, and one rank has one
    writer.
    """
    history = evidence.history
    problems = [
        f"{event.actor} committed step {event.step} for generation {event.generation} without the"
        " right to"
        for event in history.foreign
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
        ranks = [event.data["rank"] for event in run.commits]
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
            f"{some(who)}, and so near its end that clocks right to within {bound_ms:.3f} ms do not"
            " tell who was first"
        )
    return verdict_of(
        problems,
        f"{sum(len(r.commits) for r in history.runs)} commits, each by the member in charge",
    )


def _after_parking(history: History) -> list[str]:
    parked: dict[tuple[str, int], Event] = {}
    problems = []
    for event in history.log.of(Kind.PARKED, Kind.STEP_COMMITTED):
        key = (event.actor, event.generation)
        if event.kind is Kind.PARKED:
            parked.setdefault(key, event)
        elif key in parked and event.time_ns > parked[key].time_ns and event not in history.foreign:
            problems.append(f"{event.actor} committed step {event.step} after it had parked")
    return problems


def checkpoint_integrity(evidence: Evidence) -> Finding:
    """A corrupt or doubtful checkpoint is never restored, what is restored was committed before,
    the last good one and the newest that the replicas agreed on are not deleted, nor as many as are
    to be kept, and a save that fails ends no rank.
    """
    problems: list[str] = []
    good: dict[str, int] = {}
    # Not acknowledged (yet), with the generation: whoever saves may die between doing and saying
    # it, so that what goes by this name is this one, and no older one that is known to be bad.
    saving: dict[str, tuple[int, int]] = {}
    bad: set[str] = set()
    rotten: dict[str, int] = {}  # spoilt by a fault where it lay, which nobody has noticed yet
    saved_in: dict[str, int] = {}
    counts = {"restored": 0, "refused": 0, "deleted": 0, "set aside": 0}
    there: set[str] = set()  # on disk, good or bad, as far as anybody may know
    agreements = _agreements(evidence)
    for event in evidence.log.events:
        name = str(event.data.get("checkpoint") or "")
        if event.kind in _KNOWN_SINCE:
            rotten.pop(name, None)
        if event.kind is Kind.CHECKPOINT_SAVING:
            saving[name] = event.step or 0, event.generation
            there.add(name)
        elif event.kind is Kind.CHECKPOINT_FAILED:
            saving.pop(name, None)
        elif event.kind is Kind.CHECKPOINT_COMMITTED:
            there.add(name)
            good[name], _ = saving.pop(name, (event.step or 0, 0))
            saved_in[name] = event.generation
            bad.discard(name)
        elif event.kind is Kind.FAULT_INJECTED and (event.data["target"] or {}).get("checkpoint"):
            _corrupt(evidence, event, good, bad, rotten, saving)
        elif event.kind is Kind.CHECKPOINT_REFUSED:
            counts["refused"] += 1
            good.pop(name, None)
            saving.pop(name, None)
            bad.add(name)
        elif event.kind is Kind.CHECKPOINT_SET_ASIDE:
            counts["set aside"] += 1
            there.discard(name)
            good.pop(name, None)
            saving.pop(name, None)
            bad.add(name)
        elif event.kind is Kind.CHECKPOINT_DELETED:
            counts["deleted"] += 1
            doubtful = name in good and _in_doubt(
                evidence.history, event, good[name], saved_in.get(name, 0)
            )
            wrong = _deleted(name, good, rotten, _agreed_by(event, agreements, evidence))
            problems += () if doubtful else wrong or _too_few(name, there, evidence)
            there.discard(name)
        elif event.kind is Kind.GENERATION_READY and name:
            counts["restored"] += 1
            if name in saving:
                good[name], saved_in[name] = saving.pop(name)
                bad.discard(name)
            problems += _wrongly_restored(evidence, event, good, bad, saved_in)
    problems += _ended_by_a_save(evidence)
    if not any(counts.values()) and not problems:
        return passed("nothing to check: no checkpoint was restored, refused or deleted")
    return verdict_of(problems, ", ".join(f"{count} {what}" for what, count in counts.items()))


def _agreements(evidence: Evidence) -> list[tuple[int, tuple[int, int]]]:
    """Time and step of each agreement of the replicas; twice. Where all began with one checkpoint,
    it is of that step as well, ahead of the last comparison or not: they were compared when they
    held it, so that a difference that is found later is no older. Who keeps the newest from before
    either has kept what is needed.
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
    """The step of the last agreement that whoever wrote the event may have known of; -1: there was
    none.
    """
    until_ns = event.time_ns + evidence.log.clocks.bound_ns(event)
    return next((steps for time_ns, steps in reversed(agreements) if time_ns <= until_ns), (-1, -1))


def _in_doubt(history: History, deleted: Event, step: int, saved_in: int) -> bool:
    """Whether a checkpoint may hold the state of a replica that was found to differ, and is rightly
    done away with.
    """
    until_ns = deleted.time_ns + history.log.clocks.bound_ns(deleted)
    found = (f for f in diverged(history) if f.time_ns <= until_ns and saved_in <= f.generation)
    return any(step > agreed_before(history, failure)[0] for failure in found)


def _distrusted(evidence: Evidence, ready: Event, step: int, saved_in: int) -> bool:
    """Whether a checkpoint was saved after the last agreement before replicas were found to differ.
    What all took from one checkpoint was the same then; of a coordinator that took over nobody
    knows what it knew.
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


def _deleted(
    name: str, good: dict[str, int], rotten: Mapping[str, int], agreed: tuple[int, int]
) -> list[str]:
    """What is wrong with deleting a checkpoint; it is taken from ``good``. One that the replicas
    agreed on, and that is ``rotten``, is left as far as whoever deletes can know: others are read
    again before all but one go.
    """
    step = good.pop(name, None)
    left = [other for other in good if not is_memory(other)]
    if step is None:
        return []
    if not left:
        return [f"{name} was deleted though no other good checkpoint was left"]
    there = [*(good[other] for other in left), *rotten.values()]
    older = all(step <= one and not any(other <= one for other in there) for one in agreed)
    if not is_memory(name) and older:
        return [f"{name} was deleted though the replicas had agreed on no other that was left"]
    return []


def _too_few(name: str, there: set[str], evidence: Evidence) -> list[str]:
    """Whether fewer are left than are to be kept."""
    keep = evidence.cell.scenario.workload.checkpoint.keep
    left = sum(not is_memory(other) for other in there - {name})
    if name not in there or is_memory(name) or left >= keep:
        return []  # what was set aside goes by another name
    return [f"{name} was deleted though {left} others were left, and {keep} are to be kept"]


def _ended_by_a_save(evidence: Evidence) -> list[str]:
    """Ranks whose last words come straight after a save that failed."""
    problems = []
    for name, log in evidence.log.actors.items():
        for event, following in itertools.pairwise(log.events):
            if event.kind is Kind.CHECKPOINT_FAILED and following.kind is Kind.ERROR_RAISED:
                problems.append(
                    f"{name} ended because {event.data['checkpoint']} could not be saved"
                )
    return problems


def _wrongly_restored(
    evidence: Evidence,
    ready: Event,
    good: Mapping[str, int],
    bad: set[str],
    saved_in: Mapping[str, int],
) -> list[str]:
    """What is wrong with the checkpoint that a generation began with."""
    name = ready.data["checkpoint"]
    if name in bad or (
        name in good and _distrusted(evidence, ready, good[name], saved_in.get(name, 0))
    ):
        return [f"generation {ready.generation} restored {name}, which is corrupt or doubtful"]
    if name not in good:
        return [f"generation {ready.generation} restored {name}, which was never committed"]
    if good[name] != ready.data["resume_step"]:
        return [f"{name} holds step {good[name]}, resumed at {ready.data['resume_step']}"]
    return []


def _corrupt(
    evidence: Evidence,
    event: Event,
    good: dict[str, int],
    bad: set[str],
    rotten: dict[str, int],
    saving: dict[str, tuple[int, int]],
) -> None:
    """Book a checkpoint fault that landed."""
    key = (event.data["fault"], event.data["occurrence"])
    for episode in evidence.measures.episodes:
        if (episode.fault, episode.occurrence) == key and episode.landed:
            name = event.data["target"]["checkpoint"]
            if name in good:
                rotten[name] = good.pop(name)
            saving.pop(name, None)
            bad.add(name)
