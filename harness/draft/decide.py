"""Decides what a scenario says of a command, from its words and from what was seen of it.

Each decision says where it is from, or that it could not be made and what to do.
"""

from __future__ import annotations

import math
from pathlib import Path

from trainchaos.harness.draft.facts import (
    FOUND,
    LEAST_DEADLINE_S,
    LEAST_HOLD_S,
    LEAST_START_S,
    MISSING,
    UNSURE,
    Command,
    Facts,
)
from trainchaos.harness.draft.frameworks import GROUP
from trainchaos.harness.draft.progress import Proposal
from trainchaos.harness.draft.saving import find_checkpoints
from trainchaos.harness.draft.training import find_progress, find_steps
from trainchaos.harness.draft.watching.watch import Sighting
from trainchaos.harness.script.outcome_text import BEACON

RESTARTS = 2
READABLE = (1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 450, 600, 900, 1200, 1800)


def decide(
    command: Command, seen: Sighting, proposal: Proposal, directory: Path, steps: int | None
) -> Facts:
    """All facts. ``steps``: those that were asked for, if any."""
    facts = Facts(command=command, proposal=proposal)
    _launcher(facts, seen)
    _ranks(facts, seen)
    find_progress(facts, seen)
    find_steps(facts, seen, steps)
    find_checkpoints(facts, seen, directory)
    _restarts(facts, seen)
    _times(facts)
    return facts


def _launcher(facts: Facts, seen: Sighting) -> None:
    command = facts.command
    names = ", ".join(one.name for one in command.frameworks)
    kind, needed = command.launched.kind, command.launched.env(command.frameworks)
    text = command.launched.name
    text += f", started by {command.launched.by}" if command.launched.by else ""
    if seen.meets and not (kind and kind.ranks):
        meets = ", ".join(f"{name} {value}" for name, value in seen.meets.items())
        text += f", which sets {meets} for its ranks"
    text += f"; the script uses {names}" if names else ""
    change = f"{' and '.join(needed)} is set: {kind.note}" if kind and needed else ""
    facts.add("launcher", text, key="command", change=change)


def _ranks(facts: Facts, seen: Sighting) -> None:
    launched = facts.command.launched
    hidden = any(one.hidden for one in facts.command.frameworks)
    said, by = launched.ranks, "the command line says"
    worlds = [one.world for one in seen.ranks.values() if one.world]
    if said is None and worlds and not seen.grouped:
        said, by = max(worlds), "their environments say"
    if seen.grouped:
        facts.group = facts.command.group or GROUP
    least = max(seen.ranks, default=-1) + 1  # of those that there are
    if least > max(len(seen.ranks), said or 0):
        said, by = least, f"one names itself rank {least - 1}: there are at least"
    if seen.ranks:
        _found(facts, seen, said, by, least)
    elif not hidden and (said or 1) == 1 and launched.name not in ("srun", "ray"):
        text = "no process names a rank, so the process that prints the steps is the only one"
        if facts.proposal.progress is None:
            text = "no process names a rank, so the command is taken for the only one"
        facts.add("ranks", text, value="1")
    elif hidden and seen.alike and said in (None, seen.alike):
        facts.ranks = seen.alike
        text = "processes that were started alike and meet each other; nothing names their ranks,"
        text += " so they are numbered in the order in which they started"
        facts.add("ranks", text, value=str(seen.alike))
    else:  # with one, a run would take what starts the ranks for the only rank
        facts.ranks = said or max(2, len(facts.proposal.ranks))
        line = f"set RANK where the ranks are started, or {_line(facts)} in each, and correct ranks"
        facts.add(
            "ranks",
            "no process was found whose environment or beacon names its rank",
            state=MISSING,
            change="; ".join([*_notes(facts), line]),
        )


def _found(facts: Facts, seen: Sighting, said: int | None, by: str, least: int) -> None:
    """Ranks that were found. ``said``: how many there are ``by`` what, if anything says so;
    ``least``: by the numbers that they name.
    """
    count = len(seen.ranks)
    facts.ranks = max(count, said or 0)
    text = "found by their beacons" if seen.hinted else "found by the rank in their environments"
    text += f", in groups named by {facts.group}" if facts.group else ""
    if said is None or said <= count:
        facts.add("ranks", text, value=str(count))
        return
    if facts.command.launched.nodes > 1:
        change = "those of other nodes are not seen here: a run needs all ranks on this machine"
    else:
        missing = ", ".join(map(str, sorted({*range(said)} - {*seen.ranks})))
        text = f"{count} {text}, and {by} {said}; not seen: {missing}"
        change = f"correct ranks, or have each name itself: {_line(facts)} in each"
    if count < least:
        change = f"have each rank name itself: {_line(facts)} in each"
    facts.add("ranks", text, state=MISSING, change=change)


def _line(facts: Facts) -> str:
    """The line that has a rank name itself."""
    known = facts.command.frameworks
    return next((one.hook for one in known if one.hook), f"call {BEACON}")


def _notes(facts: Facts) -> list[str]:
    """What is known of how the ranks of these frameworks and of this launcher name themselves."""
    kind = facts.command.launched.kind
    notes = [one.note for one in facts.command.frameworks if one.hidden]
    return notes + ([kind.note] if kind and not kind.env and kind.note else [])


def _restarts(facts: Facts, seen: Sighting) -> None:
    launched, kind = facts.command.launched, facts.command.launched.kind
    facts.restarts = 0 if launched.restarts else RESTARTS
    ours = f"a run starts the command again, up to {RESTARTS} times"
    alone = facts.ranks == 1 and seen.together <= 1 and facts.of("ranks").found
    change = ""
    if launched.restarts:
        text = f"{launched.name} starts its ranks again, up to {launched.restarts} times"
    elif kind and kind.ranks:
        without = f" without --{kind.restarts}" if kind.restarts else ""
        text = f"{launched.name} does not start its ranks again{without}: {ours}"
    elif kind and kind.name == "python" and alone:
        text = f"one process, which nothing starts again: {ours}"
    else:
        text = f"whether the job starts its ranks again by itself is not known: {ours}"
        change = "set restarts: 0 if it does"
    facts.add("restarts", text, change=change, state=UNSURE if change else FOUND)


def _times(facts: Facts) -> None:
    """Hold of the hang, deadlines and the step of the faults."""
    proposal = facts.proposal
    report_s = (proposal.step_s or 0.0) * proposal.stride
    start_s = proposal.first_s or 0.0
    # twice what the harness takes for a hang, at least (harness.script.listen.observer)
    facts.hold_s = readable(max(LEAST_HOLD_S, 40 * report_s, 8 * proposal.longest_s))
    facts.deadline_s = readable(max(LEAST_DEADLINE_S, 2 * facts.hold_s + 3 * start_s))
    facts.start_s = readable(max(LEAST_START_S, 5 * start_s))
    reports = _middle(facts.steps // proposal.stride)
    # after a report, so that it comes at once
    facts.at = max(1, reports * proposal.stride + (proposal.stride > 1))


def _middle(count: int) -> int:
    """Somewhat behind the middle: the harness knows the usual time by then, and steps are left to
    go on with. Not where most checkpoints are saved: a fault right after one costs nothing.
    """
    half = count // 2
    for digit, every in ((7, 10), (3, 5)):
        near = half + (digit - half) % every
        if near <= 0.7 * count:
            return near
    return half


def readable(seconds: float) -> float:
    """The next number above that people like to read."""
    steps = next((one for one in READABLE if one >= seconds), None)
    return float(steps or math.ceil(seconds / 600) * 600)
