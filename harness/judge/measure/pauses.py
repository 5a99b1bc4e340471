"""Pauses between two steps: what rank 0 does besides training while the others wait in the next
all-reduce.

They are not part of a step's time: an arm that evaluates the model after every second step is as
fast as one that never does.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.record.history import NS, History, StepRun

Pauses = Mapping[tuple[int, int], float]
"""(generation, preceding step) -> seconds."""


def checkpoint_stalls(history: History) -> Pauses:
    """(generation, checkpointed step) -> seconds for which training paused beyond the usual pause
    between two steps and beyond an evaluation that is due there.

    Rank 0 writes checkpoints, and the others wait for it in the next all-reduce, so its pause is
    the job's.
    """
    return history.once(_checkpoint_stalls)


def _checkpoint_stalls(history: History) -> Pauses:
    saving = {(event.generation, event.step) for event in history.log.of(Kind.CHECKPOINT_SAVING)}
    evaluated = evaluations(history)
    return {
        key: max(0.0, extra - evaluated.get(key, 0.0))
        for key, extra in history.once(_extra).items()
        if key in saving
    }


def evaluations(history: History) -> Pauses:
    """(generation, step) -> seconds for which rank 0 evaluated the model after it: its pause beyond
    the usual one, capped at the planned length, as anything longer is a slower job.
    """
    every, takes_s = history.info.evaluate_every, history.info.evaluate_s
    if every is None:
        return {}
    return {
        key: min(extra, takes_s)
        for key, extra in history.once(_extra).items()
        if key[1] % every == 0
    }


def net_s(history: History, run: StepRun) -> float:
    """Seconds of a step without the checkpoint stall and the evaluation before it."""
    return run.seconds - history.once(_pauses).get((run.generation, run.step - 1), 0.0)


def _pauses(history: History) -> Pauses:
    stalls, evaluated = checkpoint_stalls(history), evaluations(history)
    return {
        key: stalls.get(key, 0.0) + evaluated.get(key, 0.0)
        for key in stalls.keys() | evaluated.keys()
    }


def _extra(history: History) -> dict[tuple[int, int], float]:
    """Each pause beyond the median of the pauses without a save or an evaluation."""
    every = history.info.evaluate_every
    saving = {(event.generation, event.step) for event in history.log.of(Kind.CHECKPOINT_SAVING)}
    gaps: dict[tuple[int, int], float] = {}
    for before, run in itertools.pairwise(history.runs):
        if (before.generation, before.step) != (run.generation, run.step - 1):
            continue
        committed, taken = before.done.said["rank"], run.taken.said["rank"]
        if 0 in committed and 0 in taken:
            gap = run.taken.times[taken.index(0)] - before.done.times[committed.index(0)]
            gaps[(run.generation, before.step)] = max(0, gap) / NS
    idle = [
        gap
        for key, gap in gaps.items()
        if key not in saving and not (every and key[1] % every == 0)
    ]
    usual = statistics.median(idle or [0.0])
    return {key: max(0.0, gap - usual) for key, gap in gaps.items()}
