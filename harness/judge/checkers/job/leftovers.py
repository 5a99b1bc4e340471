"""Whether the record has an end, and whether the harness, or a command, left anything behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from trainchaos.chaos.events.log import Kind, Log
from trainchaos.harness.judge.checkers.job.values import LEAVE_OUT
from trainchaos.harness.judge.evidence.evidence import (
    WARNING,
    Evidence,
    failed,
    passed,
    some,
    unknown,
    verdict_of,
)
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.results import Finding


def evidence_complete(evidence: Evidence) -> Finding:
    """Every record is whole (``record/whole.py``), and the orchestrator's has its start and end."""
    if evidence.log.first(Kind.RUN_FINISHED) is None:
        return unknown("no run_finished: the harness did not get to the end")
    return passed(f"{len(evidence.log.events)} events of {len(evidence.log.actors)} actors")


def no_orphans(evidence: Evidence) -> Finding:
    """The harness left nothing: no process, port or shared memory; every process was seen to exit,
    and every fault was healed.
    """
    if evidence.log.first(Kind.LEFTOVERS) is None:
        return unknown("leftovers were not looked for: the harness died before it could")
    problems = [f"{what} left: {found}" for what, found in left_in(evidence.log)]
    exited = evidence.history.exited_ns
    spawned = [event.data["process"] for event in evidence.log.of(Kind.PROCESS_SPAWNED)]
    problems += [f"{name} was never seen to exit" for name in spawned if name not in exited]
    problems += [
        f"{episode.fault} (occurrence {episode.occurrence}) was not healed"
        for episode in unhealed(evidence.measures.episodes)
    ]
    return verdict_of(problems, f"{len(spawned)} processes, all gone")


def left_in(log: Log) -> list[tuple[str, Any]]:
    """What the harness left: processes, ports and shared memory, where it left any."""
    left = log.first(Kind.LEFTOVERS)
    kinds = ("processes", "ports", "shared_memory") if left is not None else ()
    return [(what, left.data[what]) for what in kinds if left is not None and left.data[what]]


def unhealed(episodes: Iterable[Episode]) -> list[Episode]:
    """Faults that acted and were never undone."""
    return [one for one in episodes if one.injected and not one.failed and one.healed is None]


class _Left(NamedTuple):
    """What a command left, in words: processes; shared memory, of which some is excused."""

    running: list[str]
    memory: list[str]
    excused: list[str]


def of_a_command(evidence: Evidence) -> Finding:
    """The harness left nothing, and a command that ended well left no process running and no unused
    shared memory. What a killed rank or a command that failed leaves is excused, and named; what a
    command leaves in the control arm too is its own way: a warning.
    """
    ours, left = no_orphans(evidence), _left(evidence.log)
    problems = [*left.running, *left.memory]
    without = evidence.log if evidence.is_control else evidence.control
    usual = _left(without) if without is not None else _Left([], [], [])
    does_so = bool(left.running) <= bool(usual.running) and bool(left.memory) <= bool(usual.memory)
    if ours.verdict != "fail" and problems and does_so:
        return passed(
            f"{WARNING}{some(problems)}, without any fault too{LEAVE_OUT.format('no-orphans')}"
        )
    if problems:
        before = [ours.witness] if ours.verdict == "fail" else []
        return failed(some([*before, *problems]))
    if ours.verdict == "pass" and left.excused:
        return passed(f"{ours.witness}; {some(left.excused)} was removed")
    return ours


def _left(log: Log) -> _Left:
    found = _Left([], [], [])
    ended = list(log.of(Kind.COMMAND_ENDED))
    all_well = all(e.data["exit_code"] == 0 and not e.data["asked"] for e in ended)
    for event in ended:
        for one in event.data.get("left") or ():
            who = f"{one['name']} (pid {one['pid']})"
            how = ", in a session of its own" if one["detached"] else ""
            if event.data["exit_code"] == 0 and not event.data["asked"]:
                found.running.append(f"the command ended well and left {who} running{how}")
            else:
                found.excused.append(f"{who}, which a command that failed left running{how}")
    killed = {
        event.data["process"]
        for event in log.of(Kind.PROCESS_EXITED)
        if event.data["exit_code"] is None or event.data.get("asked_ns")
    }
    last = log.first(Kind.LEFTOVERS)
    for one in (last.data.get("of_command") or ()) if last is not None else ():
        who = f"{one['name']} (shared memory of {', '.join(one['held_by'])})"
        if not all_well or killed & set(one["held_by"]):
            found.excused.append(f"{who} of what was killed")
        else:
            found.memory.append(f"the command left {who}")
    return found
