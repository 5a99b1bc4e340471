"""Where the wall time of one arm went: useful time, and badput by class. It closes by construction.

The time line from ``run_started`` to ``run_finished`` is cut into adjacent intervals:
initialisation up to the moment the first generation holds its state; then, per generation, its step
runs one after the other; between generations the rest of the interrupted step (``recomputation``),
injection to detection (``detection``), up to the last ``group_formed`` of the next working
generation (``regroup``: abort, failed attempts and process starts included) and up to the last
``state_ready`` (``restore``); after the last step ``shutdown``. All is weighed in rank-seconds and
divided by the provisioned ranks P = ranks + spares, so an interval counts ranks / P of its length
and ``spare_idle`` is wall x spares / P.

A step run whose result the final lineage does not hold is ``recomputation``. Of a surviving one,
the extra pause of rank 0 after a checkpoint step (its gap between commit and next batch, less its
median gap elsewhere, at most the step) is ``checkpoint_save``. What remains is set against the
ideal (``ideal_of``, scaled by samples / global_batch) summed per context: a world smaller than
asked for (excess is ``degraded_world``), a lasting undetected fault (``straggling``), or neither
(``other``; evaluations between steps are in it). Data time beyond the control's median, within that
excess, is ``data``. Useful time of a context is the smaller of its ideal and its actual sum: a run
that was by chance faster than its control earns no more than the time it took, so that goodput =
useful / wall is never above the textbook formula (useful samples x ideal rank-seconds per sample /
(wall x P)) and nothing negative has to be hidden.

Pauses between two steps, what rank 0 does besides training while the others wait in the next
all-reduce, are not part of a step's time: an arm that evaluates the model after every second step
is as fast as one that never does.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import NS, Generation, History, StepRun

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


CLASSES = (
    *("initialisation", "data", "checkpoint_save", "restore", "detection", "regroup"),
    *("recomputation", "degraded_world", "straggling", "spare_idle", "shutdown", "other"),
)
_CONTEXT_CLASS = {"degraded": "degraded_world", "straggling": "straggling", "normal": "other"}


@dataclass(frozen=True, kw_only=True)
class Ideal:
    """How long a step of the full world and batch should take, and its share of waiting for data,
    in seconds. ``history``, ``runs``: the arm, and the steps of a full world in it, that say so.
    """

    step_s: float
    data_s: float
    source: str
    history: History
    runs: Sequence[StepRun]


@dataclass(frozen=True, kw_only=True)
class WallTimePartition:
    """Wall time by class, in wall-equivalent seconds over all provisioned ranks. ``productive_s``:
    time in surviving steps.
    """

    wall_s: float
    useful_s: float
    badput: Mapping[str, float]
    productive_s: float

    @property
    def residual_s(self) -> float:
        """Wall time that is in no class."""
        return self.wall_s - self.useful_s - sum(self.badput.values())

    @property
    def goodput(self) -> float:
        """Useful share of the wall time of all provisioned ranks."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0


def ideal_of(history: History, control: History | None) -> Ideal | None:
    """The ideal step: the median of the control arm's surviving steps in a full world, else of this
    arm's own before the first fault; without the first step of each generation, if there are
    others.
    """
    source, first = (history, history.first_hit_ns) if control is None else (control, None)
    own = "this arm before its first fault" if first is not None else "this arm as a whole"
    runs = [
        run
        for run in source.runs
        if run.world == source.info.ranks and (first is None or run.end_ns < first) and run.survives
    ]
    # a generation's first step pays for lazy initialisation, so it is left out if there are others
    resumes = {one.number: one.resume_step for one in source.generations}
    steady = [run for run in runs if resumes[run.generation] != run.step - 1] or runs
    if not steady:
        return None
    return Ideal(
        step_s=statistics.median(net_s(source, run) for run in steady),
        data_s=statistics.median(run.data_s for run in steady),
        source="the control arm" if control else own,
        history=source,
        runs=runs,
    )


def partition(
    history: History, ideal: Ideal | None, episodes: Sequence[Episode]
) -> WallTimePartition:
    """Split one arm's wall time. Without an ideal, nothing is useful."""
    spent: dict[str, float] = defaultdict(float)
    contexts: dict[str, list[StepRun]] = defaultdict(list)
    stalls, cursor = checkpoint_stalls(history), history.start_ns
    for generation in history.worked:
        runs = history.runs_of(generation.number)
        start = max(cursor, _training_start(generation, runs))
        _between(history, spent, cursor, start, generation, episodes)
        cursor = start
        for run in runs:
            length = max(0, run.end_ns - cursor) / NS
            if not run.survives:
                spent["recomputation"] += length
            else:
                stall = min(length, stalls.get((run.generation, run.step - 1), 0.0))
                spent["checkpoint_save"] += stall
                contexts[_context(history, run, episodes)].append(run)
                spent[f"run:{run.step}"] = length - stall
            cursor = max(cursor, run.end_ns)
    _after(history, spent, cursor, episodes)
    useful, productive = 0.0, 0.0
    for context, members in contexts.items():
        took = [spent.pop(f"run:{run.step}") for run in members]
        productive += sum(took)
        useful += _judge_context(history, spent, ideal, context, members, took)
    info = history.info
    share = info.ranks / (info.ranks + info.spares)
    badput = {name: spent[name] * share for name in CLASSES}
    badput["spare_idle"] = history.wall_s * (1 - share)
    return WallTimePartition(
        wall_s=history.wall_s, useful_s=useful * share, badput=badput, productive_s=productive
    )


def _judge_context(
    history: History,
    spent: dict[str, float],
    ideal: Ideal | None,
    context: str,
    runs: list[StepRun],
    took: list[float],
) -> float:
    """Useful seconds of one context's runs; adds the excess to its classes."""
    actual = sum(took)
    step_s, data_s = (ideal.step_s, ideal.data_s) if ideal else (0.0, 0.0)
    due = sum(step_s * run.commits[0].data["samples"] / history.info.global_batch for run in runs)
    excess = max(0.0, actual - due)
    data = min(excess, max(0.0, sum(run.data_s - data_s for run in runs)))
    spent["data"] += data
    spent[_CONTEXT_CLASS[context]] += excess - data
    return actual - excess


def _context(history: History, run: StepRun, episodes: Iterable[Episode]) -> str:
    if run.world < history.info.ranks:
        return "degraded"
    slow = any(episode.lasts_over(run.start_ns, run.end_ns) for episode in episodes)
    return "straggling" if slow else "normal"


def _training_start(generation: Generation, runs: Sequence[StepRun]) -> int:
    start = generation.stated_ns or generation.ready_ns or generation.started_ns
    return min(start, runs[0].end_ns) if runs else start


def _between(
    history: History,
    spent: dict[str, float],
    start: int,
    end: int,
    generation: Generation,
    episodes: Sequence[Episode],
) -> None:
    """Account for the time from the last step of one generation to the first of the next."""
    if generation is history.worked[0]:
        spent["initialisation"] += (end - start) / NS
        return
    began, detected = _failed(history, start, end, episodes) or (start, start)
    grouped = generation.grouped_ns or generation.started_ns
    marks = {"recomputation": began, "detection": detected, "regroup": grouped, "restore": end}
    _book(spent, start, end, marks)


def _after(
    history: History, spent: dict[str, float], start: int, episodes: Sequence[Episode]
) -> None:
    """Account for the time from the last step of all to the end of the run."""
    end = history.end_ns
    failed = _failed(history, start, end, episodes)
    unseen = any(e.injected and e.landed and e.failure is None for e in episodes)
    marks = {"shutdown": end}
    if failed and history.outcome != "completed":
        marks = {"recomputation": failed[0], "detection": failed[1], "regroup": end}
    elif unseen and history.outcome == "timed-out":
        marks = {"detection": end}  # undetected: the job waited until its time was up
    _book(spent, start, end, marks)


def _book(spent: dict[str, float], start: int, end: int, marks: Mapping[str, int]) -> None:
    cursor = start
    for name, mark in marks.items():
        until = min(max(cursor, mark), end)
        spent[name] += (until - cursor) / NS
        cursor = until


def _failed(
    history: History, start: int, end: int, episodes: Iterable[Episode]
) -> tuple[int, int] | None:
    """When the fault behind the first failure declared after the previous generation (before
    ``end``) was ready was injected, and when that failure was declared; None: there was none.
    """
    before = [
        g for g in history.worked if (g.stated_ns or g.started_ns) < end and g.started_ns < start
    ]
    since = before[-1].stated_ns or before[-1].started_ns if before else start
    for failure in history.log.of(Kind.FAILURE_DETECTED):
        if since <= failure.time_ns <= end:
            causes = (e.injected for e in episodes if e.failure is failure)
            injected = next(causes, None) or failure
            return injected.time_ns, failure.time_ns
    return None
