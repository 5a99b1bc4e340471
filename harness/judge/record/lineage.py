"""One arm's history in order: generations, step executions, and the lineage that survived.
Definitions, used by every metric and checker:

- A *step run* is one execution of one step by one generation. It ends when the last member that
  ever commits it does so.
- A commit is *fenced* if a later generation had started (``generation_started``) before it was
  written. Fenced commits and commits by non-members do not count and are kept apart. Where the
  clocks of two machines are too uncertain to decide, a commit counts, and is ``unsure`` unless the
  supervisor knew before the fence that its writer was stopped or gone.
- A commit at or below the step at which its generation resumed ends a step of an earlier one:
  sharded ranks held the reduced gradients and only learned later that the step had ended. It is
  not a step run.
- The *job commits* a step run when all members commit it, at the last one's time. If a member died
  first, the all-reduce still included every member's share, so the step counts from the moment a
  later generation is ready with ``resume_step`` at or beyond it. If the next generation resumes
  before it, the run was never committed.
- The *lineage* maps each step to the step run whose result is in the final state: a generation that
  resumes at r discards every run of a step beyond r.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from itertools import zip_longest

from trainchaos.chaos.errors import LogError
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
from trainchaos.harness.judge.record.observed import observed_history

_BySteps = dict[int, dict[int, list[Event]]]
"""Generation -> step -> events of it, in time order."""


def history_of(log: Log) -> History:
    """One arm's log in order; put in order once. Raises LogError when it has no ``run_started``."""
    return log.once("history", _history)


def _history(log: Log) -> History:
    started = log.first(Kind.RUN_STARTED)
    if started is None:
        raise LogError(
            "the log has no run_started event",
            hint="the harness died before the arm began; run it again",
        )
    info = _info(started)
    if info.observed:
        return observed_history(log, info)
    finished = log.first(Kind.RUN_FINISHED)
    own, foreign, unsure = _split_commits(log)
    generations = _generations(log, own)
    return History(
        log=log,
        info=info,
        start_ns=started.time_ns,
        end_ns=finished.time_ns if finished else max(event.time_ns for event in log.events),
        finished=finished,
        generations=generations,
        runs=_step_runs(log, own, generations),
        foreign=tuple(foreign),
        unsure=tuple(unsure),
    )


def _info(started: Event) -> RunInfo:
    data = started.data
    names = (
        *("arm", "cell", "repeat", "seed", "ranks"),
        *("spares", "steps", "global_batch", "strategy"),
    )
    evaluate = data.get("evaluate") or {}
    return RunInfo(
        **{name: data[name] for name in names},
        order_seed=data["order"]["seed"],
        order_samples=data["order"]["samples"],
        observed=bool(data.get("observed", False)),
        monitored=bool(data.get("monitored", False)),
        evaluate_every=evaluate.get("every"),
        evaluate_s=float(evaluate.get("takes", 0.0)),
    )


def _split_commits(log: Log) -> tuple[_BySteps, list[Event], list[Event]]:
    """(commits that count, commits of fenced generations or non-members, those of the first that
    may be fenced too).
    """
    begun = {event.generation: event for event in log.of(Kind.GENERATION_STARTED)}
    starts = sorted((event.generation, event.time_ns) for event in log.of(Kind.GENERATION_STARTED))
    own: _BySteps = defaultdict(lambda: defaultdict(list))
    foreign: list[Event] = []
    unsure: list[Event] = []
    number, fence, inside, one_clock = None, math.inf, frozenset[str](), log.clocks.one
    for event in log.of(Kind.STEP_COMMITTED):
        if event.generation != number:
            number = event.generation
            place = bisect.bisect_right(starts, number, key=lambda start: start[0])
            fence = starts[place][1] if place < len(starts) else math.inf
            inside = frozenset(begun[number].data["members"] if number in begun else ())
        bound = 0 if one_clock else log.clocks.bound_ns(event)
        if event.actor not in inside or event.time_ns - bound > fence:
            foreign.append(event)
            continue
        own[event.generation][event.step or 0].append(event)
        if event.time_ns + bound > fence and not _known_before(log, event, fence):
            unsure.append(event)
    return own, foreign, unsure


def _known_before(log: Log, commit: Event, fence_ns: float) -> bool:
    """Whether the supervisor knew, before it fenced a generation, that the committing process was
    stopped or gone.
    """
    for event in log.of(Kind.SURVIVORS_PARKED, Kind.PROCESS_EXITED):
        if event.time_ns > fence_ns:
            return False
        if event.kind is Kind.PROCESS_EXITED and event.data["process"] == commit.actor:
            return True
        if event.kind is Kind.SURVIVORS_PARKED and event.generation == commit.generation:
            held = event.data["processes"].get(commit.actor)
            if held is not None and held["step"] >= (commit.step or 0):
                return True
    return False


def _generations(log: Log, commits: _BySteps) -> tuple[Generation, ...]:
    ready = {event.generation: event for event in log.of(Kind.GENERATION_READY)}
    grouped = {event.generation: event.time_ns for event in log.of(Kind.GROUP_FORMED)}
    stated = {event.generation: event.time_ns for event in log.of(Kind.STATE_READY)}
    # a number that was given twice is held against the job (single-writer); here it is one
    last = {event.generation: event for event in log.of(Kind.GENERATION_STARTED)}
    started = [last[number] for number in sorted(last)]
    made: list[Generation] = []
    for event, following in zip_longest(started, started[1:]):
        number, done = event.generation, ready.get(event.generation)
        resume = done.data["resume_step"] if done else None
        if done is None and number in commits:
            # commits at or below ``finish`` end an earlier generation's step and are not own steps
            resume = max(min(commits[number]) - 1, int(event.data.get("finish", 0)))
        made.append(
            Generation(
                number=number,
                members=tuple(event.data["members"]),
                shards=event.data.get("shards", 1),
                cause=event.data["cause"],
                state=event.data["state"],
                started_ns=event.time_ns,
                ready_ns=done.time_ns if done else None,
                resume_step=resume,
                checkpoint=done.data["checkpoint"] if done else None,
                grouped_ns=grouped.get(number),
                stated_ns=stated.get(number),
                fenced_ns=following.time_ns if following else None,
            )
        )
    return tuple(made)


def _step_runs(
    log: Log, commits: _BySteps, generations: tuple[Generation, ...]
) -> tuple[StepRun, ...]:
    taken: _BySteps = defaultdict(lambda: defaultdict(list))
    for event in log.of(Kind.BATCH_TAKEN):
        taken[event.generation][event.step or 0].append(event)
    worked = [g for g in generations if g.resume_step is not None]
    resumed = {g.number: g.resume_step or 0 for g in worked}
    made = [(number, step) for number, steps in commits.items() for step in steps]
    surviving = owners(worked, [key for key in made if key[1] > resumed.get(key[0], 0)])
    runs: list[StepRun] = []
    for generation, following in zip_longest(worked, worked[1:]):
        number, members = generation.number, frozenset(generation.members)
        cursor = generation.stated_ns or generation.ready_ns or generation.started_ns
        for step in sorted(step for step in commits[number] if step > resumed[number]):
            done = Lines(sorted(commits[number][step], key=lambda e: e.data["rank"]), COMMITS)
            end = max(done.times)
            committed = end if members.issubset(done.actors) else _kept_at(following, step)
            runs.append(
                StepRun(
                    generation=number,
                    step=step,
                    start_ns=min(cursor, end),
                    end_ns=end,
                    committed_ns=committed,
                    world=generation.world,
                    done=done,
                    taken=Lines(taken[number][step], BATCHES),
                    survives=surviving.get(step) == number and committed is not None,
                )
            )
            cursor = max(cursor, end)
    return tuple(runs)


def _kept_at(following: Generation | None, step: int) -> int | None:
    """When a step that some members did not commit was kept by the next generation."""
    if following is None or (following.resume_step or 0) < step:
        return None
    return following.ready_ns or following.started_ns
