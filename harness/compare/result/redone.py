"""Finds committed steps that were trained again, and samples that were lost."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.history import History


def redone(history: History, injected_ns: int) -> list[int]:
    """Steps that had been done and were done again after the fault, in order, each once.

    If ranks are known, a step counts if all members of a generation had reported it (the condition
    for a commit everywhere in this project) and most of a later generation report it again. A step
    does not count if only the lost rank had finished it, or if some ranks finished it before a
    spare joined and the others after: from outside a spare may be seen some steps after it joined,
    so the rest of a step is then reported by a generation that did not begin with it.
    """
    if not _told_by_rank(history):
        lost = (run for run in history.runs if not run.survives and run.committed_ns is not None)
        return sorted({run.step for run in lost if _ends(history, run.step) > injected_ns})
    worlds = {generation.number: generation.world for generation in history.generations}
    ranks: dict[tuple[int, int], set[int]] = {}
    whole: dict[int, int] = {}
    again: set[int] = set()
    for event in history.log.of(Kind.STEP_REPORTED):
        step, number = event.step or 0, event.generation
        reporters = ranks.setdefault((number, step), set())
        reporters.add(int(event.data["rank"]))
        world = worlds.get(number, math.inf)
        if (
            event.time_ns > injected_ns
            and whole.get(step, number) < number
            and 2 * len(reporters) > world
        ):
            again.add(step)
        if len(reporters) >= world:
            whole.setdefault(step, number)
    return sorted(again)


def _told_by_rank(history: History) -> bool:
    return history.info.observed and all(
        event.data["rank"] is not None for event in history.log.of(Kind.STEP_REPORTED)
    )


def _ends(history: History, step: int) -> int:
    run = history.lineage.get(step)
    return run.end_ns if run is not None else 0


def _advances(history: History) -> list[int]:
    """Times at which a new highest step was done, in ns, in order."""
    times, high = [], 0
    for run in sorted(
        (r for r in history.runs if r.committed_ns is not None),
        key=lambda r: (r.committed_ns or 0, r.step),
    ):
        if run.step > high:
            high = run.step
            times.append(run.committed_ns or 0)
    return times


def samples_lost(history: History) -> tuple[int | None, str]:
    """(number of samples of the global batches that no rank reported as trained, or why that is
    unknown).

    In an observed job, each rank must report its own samples. The samples of a rank lost in a step
    that others completed count as trained: others complete a step only after its all-reduce, which
    includes every member's gradients.
    """
    info = history.info
    if not info.observed:
        return None, "counted by the checker of the built-in workload"
    reports: dict[int, list[Event]] = {}
    for event in history.log.of(Kind.STEP_REPORTED):
        if event.data["rank"] is None or event.data["samples"] is None:
            return None, "its ranks do not report their samples"
        reports.setdefault(event.step or 0, []).append(event)
    died, again = _died_in(history), set(redone(history, 0))
    lost = 0
    for step, run in history.lineage.items():
        mine = [
            e for e in reports.get(step, ()) if step not in again or e.generation == run.generation
        ]
        shares = {int(event.data["rank"]): int(event.data["samples"]) for event in mine}
        missing = max(0, info.global_batch - sum(shares.values()))
        lost += 0 if step in died else missing
    return lost, ""


def _died_in(history: History) -> set[int]:
    """Steps in which a member was lost: the first step it did not report. Its rank number may be
    reused afterwards.
    """
    found = set()
    for lost, rank in _losses(history):
        mine = [
            event.step or 0
            for event in history.log.of(Kind.STEP_REPORTED)
            if event.generation == lost.generation
            and event.data["rank"] == rank
            and event.time_ns < lost.time_ns
        ]
        found.add(max(mine, default=0) + 1)
    return found


def _losses(history: History) -> Iterator[tuple[Event, int | None]]:
    """Each failure, and each unexpected end of a member, with its rank: of one that ends as the
    others do the last step, no failure is declared, as the job is over.
    """
    for event in history.log.of(Kind.FAILURE_DETECTED, Kind.PROCESS_EXITED):
        if event.kind is Kind.FAILURE_DETECTED:
            yield event, event.data["rank"]
            continue
        generation = history.generation(event.generation)
        rank = generation.ranks.get(event.data["process"]) if generation is not None else None
        if rank is not None and not event.data["expected"]:
            yield event, rank
