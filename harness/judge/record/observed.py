"""A command's arm put in order, as far as it was seen from outside. See
``harness.judge.record.lineage``.

Less is known than of a built-in workload, so some things are inferred:

- A step counts as done when the first rank reports it.
- A script may report only every so many steps. The usual distance (``stride``) is learned. Steps
  between two reports are taken as evenly spaced in time, but as committed only with the later
  report, so that no recovery looks faster than it was seen to be.
- A generation resumes one stride before its first report. The steps lost in a rollback are thereby
  overestimated by up to one stride, never underestimated.
- Its first step began one usual step time before the first report; until then it was restoring.
- A progress bar is drawn before any work is done, as ``0/100`` even where it goes on at 20: what a
  later generation reports for the first step counts only when the next steps follow.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.harness.judge.record.history import (
    BATCHES,
    COMMITS,
    Generation,
    History,
    Lines,
    RunInfo,
    StepRun,
    owners,
)

MOST_BETWEEN = 10_000
MOST_STEPS = 40_000
"""Steps of a job that are each a step run. Of a longer one, each report is, as if the steps since
the one before were one: ``harness.script.listen.observer`` records a part of its reports.
"""
UNSURE = 2
SKIPPED = 10
"""Steps that a bar may skip before its first frame; a job that goes on from an earlier run goes on
far behind its beginning.
"""


@dataclass(frozen=True, kw_only=True)
class _Report:
    """The first report of a step in a generation, with the samples of all ranks that
    reported it.
    """

    step: int
    time_ns: int
    event: Event
    samples: int | None


def observed_history(log: Log, info: RunInfo) -> History:
    """Put one arm's log in order."""
    started, finished = log.first(Kind.RUN_STARTED), log.first(Kind.RUN_FINISHED)
    assert started is not None
    starts = sorted(log.of(Kind.GENERATION_STARTED), key=lambda event: event.generation)
    reports = log.once("reports", _reported)
    stride = _stride(reports)
    reports = _without_bars(reports, stride)
    usual_ns = _usual_ns(reports)
    sizes = [r.samples for rows in list(reports.values())[:1] for r in rows if r.samples]
    if sizes:
        info = replace(info, global_batch=max(1, round(statistics.median(sizes))))
    generations = [
        _generation(event, reports[event.generation], stride, usual_ns, following)
        for event, following in itertools.zip_longest(starts, starts[1:])
    ]
    return History(
        log=log,
        info=info,
        start_ns=started.time_ns,
        end_ns=finished.time_ns if finished else max(event.time_ns for event in log.events),
        finished=finished,
        generations=tuple(generations),
        runs=_runs(info, generations, reports),
        foreign=(),
    )


def from_0(history: History) -> bool:
    """Whether a bar stated, before the first step that was reported, that none was done yet, and
    skipped no more than it did later: tqdm draws 10 frames a second, however fast the steps are
    (https://tqdm.github.io/docs/tqdm/, ``mininterval``).
    """
    said = history.finished.data.get("drawn") if history.finished else None
    first = [event.step or 0 for event in history.reports if event.generation <= 1]
    most = max((after - before for before, after in itertools.pairwise(first)), default=0)
    return bool(said and first) and first[0] <= max(SKIPPED, 2 * most)


def stride_of(history: History) -> int:
    """The usual distance between two reported steps."""
    return _stride(history.log.once("reports", _reported))


def grid_of(history: History) -> int:
    """The largest distance between two reported steps, but for a tenth of them: a bar that is drawn
    in time skips more or fewer.
    """
    gaps = sorted(_gaps(history.log.once("reports", _reported)))
    return gaps[len(gaps) * 9 // 10] if gaps else 1


def unseen(history: History) -> str:
    """Why a command has no step that can be judged."""
    if history.reports:
        return "steps of the command were reported, and none of its ranks was found"
    return "no step of the command was seen"


def samples_of_steps(history: History) -> dict[tuple[int, int], int]:
    """(generation, step) -> samples summed over its ranks, for steps that every member reported.

    Generations with more ranks than the job has are left out, and so are the last ``UNSURE`` steps
    of each: fewer ranks that repeat them may not be recognised as a new generation yet.
    """
    reported: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    worlds = {g.number: g.world for g in history.generations if g.world <= history.info.ranks}
    for event in history.reports:
        rank, samples = event.data["rank"], event.data["samples"]
        if rank is not None and samples is not None:
            shares = reported[event.generation, event.step or 0]
            shares[int(rank)] = min(int(samples), shares.get(int(rank), int(samples)))
    steps: dict[int, list[int]] = defaultdict(list)
    for number, step in sorted(reported):
        steps[number].append(step)
    return {
        (number, step): sum(shares.values())
        for (number, step), shares in reported.items()
        if len(shares) == worlds.get(number) and step not in steps[number][-UNSURE:]
    }


def _reported(log: Log) -> dict[int, list[_Report]]:
    """Generation -> its first reports of steps in order of time, each of a later step than the one
    before.
    """
    mine: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in log.of(Kind.STEP_REPORTED):
        mine[event.generation][event.step or 0].append(event)
    started = log.of(Kind.GENERATION_STARTED)
    return {event.generation: _reports(event, mine[event.generation]) for event in started}


def _reports(generation: Event, by_step: dict[int, list[Event]]) -> list[_Report]:
    world = max(1, len(generation.data["members"]))
    rows: list[_Report] = []
    for step, events in by_step.items():  # in order of first report
        if rows and step <= rows[-1].step:
            continue
        given = [int(e.data["samples"]) for e in events if e.data["samples"] is not None]
        said = min(int(event.data["reported_ns"]) for event in events)
        earliest = max(generation.time_ns, rows[-1].time_ns if rows else 0)
        row = _Report(
            step=step,
            time_ns=min(max(said, earliest), events[0].time_ns),
            event=events[0],
            samples=round(sum(given) * world / len(given)) if given else None,
        )
        rows.append(row)
    return rows


def _without_bars(reports: dict[int, list[_Report]], stride: int) -> dict[int, list[_Report]]:
    """Reports without a later generation's first one if that is of step 0 or 1 and the next jumps
    ahead.
    """
    return {
        number: rows[1:]
        if number > 1
        and len(rows) > 1
        and rows[0].step <= 1
        and rows[1].step - rows[0].step > stride
        else rows
        for number, rows in reports.items()
    }


def _pairs(reports: dict[int, list[_Report]]) -> Iterator[tuple[_Report, _Report]]:
    """Two reports after each other."""
    return itertools.chain.from_iterable(map(itertools.pairwise, reports.values()))


def _gaps(reports: dict[int, list[_Report]]) -> list[int]:
    return [after.step - before.step for before, after in _pairs(reports)]


def _stride(reports: dict[int, list[_Report]]) -> int:
    usual = Counter(_gaps(reports)).most_common(1)
    return usual[0][0] if usual else 1


def _usual_ns(reports: dict[int, list[_Report]]) -> float:
    """Median time of one step; 0 if there are no two successive reports."""
    times = [(b.time_ns - a.time_ns) / (b.step - a.step) for a, b in _pairs(reports)]
    return statistics.median(times) if times else 0.0


def _generation(
    event: Event, rows: Sequence[_Report], stride: int, usual_ns: float, following: Event | None
) -> Generation:
    resume = max(0, rows[0].step - stride) if rows else None
    ready = None
    if rows and resume is not None:
        ready = max(event.time_ns, round(rows[0].time_ns - usual_ns * (rows[0].step - resume)))
    return Generation(
        number=event.generation,
        members=tuple(event.data["members"]),
        cause=event.data["cause"],
        state="own",
        started_ns=event.time_ns,
        ready_ns=ready,
        resume_step=resume,
        checkpoint=None,
        grouped_ns=event.time_ns,
        stated_ns=ready,
        fenced_ns=following.time_ns if following is not None else None,
    )


def _runs(
    info: RunInfo, generations: Sequence[Generation], reports: dict[int, list[_Report]]
) -> tuple[StepRun, ...]:
    worked = [g for g in generations if g.resume_step is not None]
    most = MOST_BETWEEN if info.steps <= MOST_STEPS else 0
    spans = {g.number: list(_spans(g, reports[g.number], most)) for g in worked}
    surviving = owners(
        worked, ((number, step) for number, rows in spans.items() for step, *_ in rows)
    )
    return tuple(
        StepRun(
            generation=g.number,
            step=step,
            start_ns=start,
            end_ns=end,
            committed_ns=report.time_ns,
            world=g.world,
            done=Lines([_commit(info, g, step, report)], COMMITS),
            taken=Lines([], BATCHES),
            survives=surviving.get(step) == g.number,
        )
        for g in worked
        for step, start, end, report in spans[g.number]
    )


def _spans(
    generation: Generation, rows: Sequence[_Report], most: int
) -> list[tuple[int, int, int, _Report]]:
    """(step, start, end, report that shows it done) for every step, including those between
    reports, if they are at most so many.
    """
    found = []
    before, cursor = generation.resume_step or 0, generation.ready_ns or generation.started_ns
    for row in rows:
        first = before + 1 if row.step - before <= most else row.step
        count, took = row.step - first + 1, row.time_ns - cursor
        for number in range(count):
            start, end = (cursor + took * n // count for n in (number, number + 1))
            found.append((first + number, start, end, row))
        before, cursor = row.step, row.time_ns
    return found


def _commit(info: RunInfo, generation: Generation, step: int, report: _Report) -> Event:
    """A report in the form of a built-in workload's commit."""
    data: dict[str, Any] = {
        "rank": 0,
        "world": generation.world,
        "samples": report.samples or info.global_batch,
        "loss": report.event.data["loss"] if step == report.step else None,
        "seconds": {},
    }
    return replace(report.event, step=step, data=data)
