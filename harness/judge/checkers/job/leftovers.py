"""Whether a command left anything behind, and whether the harness did."""

from __future__ import annotations

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers.record.records import no_orphans as nothing_of_ours
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, some
from trainchaos.harness.judge.results import Finding


def no_orphans(evidence: Evidence) -> Finding:
    """The harness left nothing, and a command that ended well left no process running and no unused
    shared memory. Shared memory of a killed rank is excused.
    """
    ours = nothing_of_ours(evidence)
    problems = []
    for ended in evidence.log.of(Kind.COMMAND_ENDED):
        for one in ended.data.get("left") or ():
            how = ", in a session of its own" if one["detached"] else ""
            problems.append(
                f"the command ended well and left {one['name']} (pid {one['pid']}) running{how}"
            )
    killed = {
        event.data["process"]
        for event in evidence.log.of(Kind.PROCESS_EXITED)
        if event.data["exit_code"] is None or event.data.get("asked_ns")
    }
    well = all(
        e.data["exit_code"] == 0 and not e.data["asked"]
        for e in evidence.log.of(Kind.COMMAND_ENDED)
    )
    left = evidence.log.first(Kind.LEFTOVERS)
    memory = (left.data.get("of_command") or ()) if left is not None else ()
    excused = []
    for one in memory:
        who = f"{one['name']} (shared memory of {', '.join(one['held_by'])})"
        if not well or killed & set(one["held_by"]):
            excused.append(who)
        else:
            problems.append(f"the command left {who}")
    if problems:
        before = [ours.witness] if ours.verdict == "fail" else []
        return failed(some([*before, *problems]))
    if ours.verdict == "pass" and excused:
        return passed(f"{ours.witness}; {some(excused)} of what was killed was removed")
    return ours
