"""The gate before all checkers: whose record of an arm is whole.

A record is whole if its file was read line by line, without a gap, to the end that its writer or
its supervisor states, if it is that of the process that was started, and if it holds nothing that
cannot be. One that is not proves nothing, neither guilt nor innocence: what depends on it is
inconclusive, and no metric is taken from its arm.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import le
from pathlib import PurePath

from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Event, Kind, Log
from trainchaos.harness.judge.record.nodes import silenced

CLOCK_S = 0.1
"""How far apart the difference of monotonic and wall clock may seem on one machine: they are read
one after the other, and a busy machine may hold the reader up in between.
"""
SLEW = 500e-6
"""Rate at which a time service may slew a wall clock (adjtimex(2))."""
SIMULATED = "sim"
LARGEST_MACHINE = 8192  # processors: what Linux is built for at most (NR_CPUS)
_DURATIONS = (Kind.GROUP_FORMED, Kind.STATE_READY, Kind.CHECKPOINT_COMMITTED, Kind.PLACE_CHECKED)


def broken(log: Log) -> Mapping[str, str]:
    """Actor -> why its record is not whole, without those whose record is."""
    return log.once("broken", _broken)


def whole(log: Log) -> Log:
    """The part of a log that is known to be whole."""
    found = broken(log)
    if not found:
        return log
    return replace(
        log,
        actors={name: one for name, one in log.actors.items() if name not in found},
        events=tuple(event for event in log.events if event.actor not in found),
    )


def _broken(log: Log) -> Mapping[str, str]:
    pids = {e.data["process"]: e.data["pid"] for e in log.of(Kind.PROCESS_SPAWNED)}
    found = {name: why for name, why in log.clocks.unsure().items() if name in log.actors}
    ready = [event.data["process"] for event in log.of(Kind.PROCESS_READY)]
    dropped = (file for event in log.of(Kind.FILES_DROPPED) for file in event.data["files"])
    gone = [PurePath(file).stem for file in dropped if str(file).endswith(".jsonl")]
    found |= {
        name: f"there is no {name}.jsonl"
        for name in (ORCHESTRATOR, *ready, *gone)
        if name not in log.actors
    }
    # ended before it wrote a line, as its supervisor states: a spare that a finished job needs not
    silent = {e.data["process"] for e in log.of(Kind.PROCESS_EXITED) if e.data["last_seq"] == -1}
    for name, actor in log.actors.items():
        if name in silent.difference(ready) and not actor.events and not actor.problems:
            continue
        if (why := next(_wrong(actor, pids.get(name)), None)) is not None:
            found[name] = why
    return {**_of_another_clock(log), **dict(_cut_short(log)), **found}


def _cut_short(log: Log) -> Iterator[tuple[str, str]]:
    """Records that end more than a step before what others committed in the same generation, which
    no rank can do alone. The supervisor may know of fewer lines, where a fault kept a heartbeat
    from it. One step may be a share that was left out, which is for the checkers; a node that was
    lost took the ends of its ranks' records along.
    """
    reached: dict[int, dict[str, int]] = defaultdict(dict)
    ends = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_EXITED)}
    for event in log.of(Kind.STEP_COMMITTED):
        if event.time_ns <= ends.get(event.actor, math.inf):  # one that goes on is for ``landing``
            done = reached[event.generation]
            done[event.actor] = max(event.step or 0, done.get(event.actor, 0))
    for name, actor in log.actors.items():
        last = next((e for e in reversed(actor.events) if e.kind is Kind.BATCH_TAKEN), None)
        if last is None or actor.ended or name in silenced(log):
            continue
        others = (step for other, step in reached[last.generation].items() if other != name)
        if (high := max(others, default=0)) > (last.step or 0) + 1:
            yield name, f"{name}.jsonl: ends in step {last.step}, others committed step {high}"


def _wrong(actor: ActorLog, pid: int | None) -> Iterator[str]:
    """What is wrong with one record. ``pid``: of the process that was started under its name."""
    yield from actor.problems[:1]
    if actor.kinds[:1] != [Kind.ACTOR_STARTED]:
        yield f"{actor.actor}.jsonl: it has no beginning"
        return
    own = actor.events[0].data["pid"]
    if pid is not None and own != pid:
        yield f"{actor.actor}.jsonl: of process {own}, and {pid} was started"
    if not all(map(le, actor.times, actor.times[1:])):
        late = next(b for a, b in itertools.pairwise(actor.events) if b.time_ns < a.time_ns)
        yield f"{actor.actor}.jsonl: its clock runs backwards at seq {late.seq}"
    for event in actor.events:
        if event.kind in _IMPOSSIBLE and (why := _IMPOSSIBLE[event.kind](event)):
            yield f"{actor.actor}.jsonl: seq {event.seq}: {why}"


def _duration(event: Event) -> str:
    return _negative(event, event.data["seconds"])


def _of_step(event: Event) -> str:
    spent = event.data["seconds"].values()
    return _negative(event, min(spent, default=0.0)) or _negative(event, max(spent, default=0.0))


def _silence(event: Event) -> str:
    return _negative(event, event.data.get("silent_s") or 0.0)


def _negative(event: Event, seconds: float) -> str:
    if math.isfinite(seconds) and seconds >= 0:
        return ""
    return f"{event.kind.value} took {seconds} s"


def _usage(event: Event) -> str:
    """Processor time of a process against its own life, by its monotonic clock (since boot)."""
    used_s = float(event.data.get("cpu_s") or 0.0)
    if 0 <= used_s <= LARGEST_MACHINE * max(event.time_ns, 0) / 1e9:
        return ""
    return f"its process used {used_s} s of processors"


_IMPOSSIBLE = {
    **dict.fromkeys(_DURATIONS, _duration),
    Kind.STEP_COMMITTED: _of_step,
    Kind.FAILURE_DETECTED: _silence,
    Kind.ACTOR_ENDED: _usage,
}


def _of_another_clock(log: Log) -> dict[str, str]:
    """Actors whose wall clock, beside their monotonic one, is another than the first one's on their
    node: their times cannot be set against others'.
    """
    nodes = {e.data["process"]: e.data.get("node") for e in log.of(Kind.PROCESS_SPAWNED)}
    first: dict[int | None, Event] = {}
    found = {}
    for event in log.of(Kind.ACTOR_STARTED):
        if event.data["host"] == SIMULATED:
            continue  # whose wall clock stands still
        one = first.setdefault(nodes.get(event.actor), event)
        apart_ns = event.data["wall_ns"] - one.data["wall_ns"] - (event.time_ns - one.time_ns)
        slack_ns = CLOCK_S * 1e9 + SLEW * abs(event.time_ns - one.time_ns)
        if abs(apart_ns) > slack_ns:
            found[event.actor] = (
                f"{event.actor}.jsonl: its clocks are {apart_ns / 1e9:+.3f} s apart from those of"
                f" {one.actor}"
            )
    return found
