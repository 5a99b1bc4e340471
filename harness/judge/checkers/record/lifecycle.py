"""Whether processes, generations, checkpoints and failures go through their states in order."""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, some, unknown
from trainchaos.harness.judge.lifecycle import causes, lives, saves
from trainchaos.harness.judge.results import Finding
from trainchaos.recovery.policy.interval import steps_of


def lifecycle(evidence: Evidence) -> Finding:
    """Every lifecycle is complete and in order.

    A process that ends was started, and one that joins a generation was ready. Generations and
    failures are numbered without gaps. A rank that trains has joined its group and holds its state.
    Each failure's cause fits its process's end. Saves begin before they end, every due save begins,
    and what was restored is what the members report.
    """
    history, log = evidence.history, evidence.log
    problems = list(dict.fromkeys(_problems(evidence)))
    if problems and log.problems:
        return unknown(f"{some(problems)}; but the log is incomplete: {log.problems[0]}")
    if problems:
        return failed(some(problems))
    count = sum(1 for _ in log.of(Kind.PROCESS_SPAWNED))
    return passed(
        f"{count} processes and {len(history.generations)} generations, each step by step"
    )


def _problems(evidence: Evidence) -> Iterator[str]:
    history = evidence.history
    yield from lives.processes(history)
    yield from lives.generations(history)
    yield from causes.causes(history)
    if history.info.observed:
        yield from lives.commands(history)
        return
    yield from saves.saves(history)
    yield from saves.acknowledged(history)
    yield from saves.restored(history)
    memory = evidence.cell.scenario.workload.checkpoint.in_memory
    if memory is not None and memory.steps:
        yield from saves.due_in_memory(history, memory.steps)
    started = evidence.log.first(Kind.RUN_STARTED)
    every = steps_of(started.data.get("checkpoint_every") or "") if started else None
    # in async mode a busy disk may postpone a save
    if every and evidence.cell.scenario.workload.checkpoint.mode != "async":
        yield from saves.due(history, every)
