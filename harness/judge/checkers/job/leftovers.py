"""Whether a command left anything behind, and whether the harness did."""

from __future__ import annotations

from typing import NamedTuple

from trainchaos.chaos.events.log import Kind, Log
from trainchaos.harness.judge.checkers.job.values import LEAVE_OUT
from trainchaos.harness.judge.checkers.record.records import no_orphans as nothing_of_ours
from trainchaos.harness.judge.evidence.evidence import WARNING, Evidence, failed, passed, some
from trainchaos.harness.judge.results import Finding


class _Left(NamedTuple):
    """What a command left, in words: processes; shared memory, of which some is excused."""

    running: list[str]
    memory: list[str]
    excused: list[str]


def no_orphans(evidence: Evidence) -> Finding:
    """The harness left nothing, and a command that ended well left no process running and no unused
    shared memory. What a killed rank or a command that failed leaves is excused, and named; what a
    command leaves in the control arm too is its own way: a warning.
    """
    ours, left = nothing_of_ours(evidence), _left(evidence.log)
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
    running, excused = [], []
    for ended in log.of(Kind.COMMAND_ENDED):
        for one in ended.data.get("left") or ():
            who = f"{one['name']} (pid {one['pid']})"
            how = ", in a session of its own" if one["detached"] else ""
            if ended.data["exit_code"] == 0 and not ended.data["asked"]:
                running.append(f"the command ended well and left {who} running{how}")
            else:
                excused.append(f"{who}, which a command that failed left running{how}")
    killed = {
        event.data["process"]
        for event in log.of(Kind.PROCESS_EXITED)
        if event.data["exit_code"] is None or event.data.get("asked_ns")
    }
    well = all(e.data["exit_code"] == 0 and not e.data["asked"] for e in log.of(Kind.COMMAND_ENDED))
    found = log.first(Kind.LEFTOVERS)
    memory = []
    for one in (found.data.get("of_command") or ()) if found is not None else ():
        who = f"{one['name']} (shared memory of {', '.join(one['held_by'])})"
        if not well or killed & set(one["held_by"]):
            excused.append(f"{who} of what was killed")
        else:
            memory.append(f"the command left {who}")
    return _Left(running, memory, excused)
