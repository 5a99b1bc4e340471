"""Which committed steps were trained again, and which samples were lost."""

from __future__ import annotations

import math

from chaos.events.log import Event, Kind
from harness.judge.record.history import History


def redone(history: History, injected_ns: int) -> list[int]:
    """Steps that had been done and were done again after the fault, in order, each once.

    Where ranks are known a step counts when all members of a generation had reported it, which is
    what it takes to be committed anywhere in this project, and most of a later generation report it
    again. One that only the lost rank had finished, or that some finished before a spare joined and
    the others after, was not: from outside a spare may be found some steps after it joined, so that
    the rest of a step is reported by a generation that did not begin with it.
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
        told = ranks.setdefault((number, step), set())
        told.add(int(event.data["rank"]))
        world = worlds.get(number, math.inf)
        if (
            event.time_ns > injected_ns
            and whole.get(step, number) < number
            and 2 * len(told) > world
        ):
            again.add(step)
        if len(told) >= world:
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
    """Times at which a step beyond all before was done, ns, in order."""
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
    """(samples of the global batches that no rank reported to have trained on, why it is not
    known).

    Of an observed job each rank must report its own samples. The share of a rank that was lost in a
    step that others completed counts as trained on: they complete a step when its all-reduce has
    every member's share.
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
    """Steps in which some member was lost: the first that it did not report. Its number may be
    another's afterwards.
    """
    found = set()
    for failure in history.log.of(Kind.FAILURE_DETECTED):
        mine = [
            event.step or 0
            for event in history.log.of(Kind.STEP_REPORTED)
            if event.generation == failure.generation
            and event.data["rank"] == failure.data["rank"]
            and event.time_ns < failure.time_ns
        ]
        found.add(max(mine, default=0) + 1)
    return found
