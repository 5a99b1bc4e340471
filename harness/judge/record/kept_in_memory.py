"""In-memory checkpoints in the log: those held by a living keeper, which a restore must find."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.chaos.fault.aftermath import OVER_WHEN_DONE
from trainchaos.harness.judge.record.episode import Episode, processes_hit
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.nodes import hit_before, homes
from trainchaos.harness.judge.record.split import doubtful
from trainchaos.recovery.checkpoint.memory import KEPT, ROLE

PLACE = "memory"
STOPPED = ("T", "t")
STOP_SIGNAL = "SIGSTOP"
_SAVES = (
    *(Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_COMMITTED),
    *(Kind.CHECKPOINT_REFUSED, Kind.CHECKPOINT_DELETED),
)


def keepers(log: Log) -> dict[str, Event]:
    """Checkpoint keepers by name -> the event of their start."""
    return {
        event.data["process"]: event
        for event in log.of(Kind.PROCESS_SPAWNED)
        if event.data["role"] == ROLE
    }


def held_in_memory(
    history: History, *, since_ns: int, until_ns: int, before: int
) -> dict[str, int]:
    """In-memory checkpoints that generations ``before`` this one acknowledged by ``until_ns`` and
    whose every shard is held by a keeper that lives then: name -> step.

    Excluded are checkpoints that were since refused as damaged; that were dropped, if they were
    doubtful (``split.doubtful``); and that were displaced by as many newer ones as keepers hold,
    good or bad, acknowledged or not. A keeper that was stopped at any time from ``since_ns`` to
    ``until_ns`` does not answer, so what it holds does not count.

    A keeper holds what ranks of its node saved, and the copies that an event says its node has. A
    keeper that ended has lost everything, and its successor on the node starts empty.
    """
    log = history.log
    silent = {name for name, begun, end in stops(log) if begun <= until_ns and end >= since_ns}
    lives = [
        (start.data.get("node"), start.time_ns)
        for name, start in keepers(log).items()
        if name not in silent and history.exited_ns.get(name, math.inf) > until_ns
    ]
    nodes = {e.data["process"]: e.data.get("node") for e in log.of(Kind.PROCESS_SPAWNED)}
    said: dict[tuple[str, int], set[int]] = defaultdict(set)
    held: dict[tuple[str, int], set[int]] = defaultdict(set)
    wanted: dict[tuple[str, int], tuple[int, int]] = {}
    lines = [
        event
        for event in log.of(*_SAVES)
        if event.data.get("place") == PLACE and event.time_ns <= until_ns
    ]
    unsaid = _kept_unsaid(lines)
    for event in lines:
        name = event.data["checkpoint"]
        key = (name, event.generation)
        if event.kind in (Kind.CHECKPOINT_REFUSED, Kind.CHECKPOINT_DELETED):
            refused = event.kind is Kind.CHECKPOINT_REFUSED
            for key in [key for key in wanted if key[0] == name]:
                if refused or doubtful(history, event, wanted[key][0], key[1]):
                    del wanted[key]
            continue
        acknowledged = event.kind is Kind.CHECKPOINT_COMMITTED
        if event.generation >= before or not (acknowledged or key in unsaid):
            continue
        wanted[key] = (event.step or 0, event.data["shards"])
        said[key].add(event.data["shard"])
        if acknowledged:
            holders = {nodes.get(event.actor), *event.data["copies"]}
            if any(node in holders and start <= event.time_ns for node, start in lives):
                held[key].add(event.data["shard"])
        whole = sorted(
            (k[1], step, k) for k, (step, shards) in wanted.items() if len(said[k]) == shards
        )
        for _, _, older in whole[:-KEPT]:
            del wanted[older]
    return {key[0]: step for key, (step, shards) in wanted.items() if len(held[key]) == shards}


def _kept_unsaid(lines: Sequence[Event]) -> set[tuple[str, int]]:
    """(name, generation) of saves that were not acknowledged before their generation ended but were
    held by keepers, since they were dropped by name later.
    """
    saved: dict[str, int] = {}
    found: set[tuple[str, int]] = set()
    for event in lines:
        name = event.data["checkpoint"]
        if event.kind is Kind.CHECKPOINT_SAVING:
            saved[name] = event.generation
        elif event.kind is Kind.CHECKPOINT_COMMITTED:
            saved.pop(name, None)
        elif event.kind is Kind.CHECKPOINT_DELETED and name in saved:
            found.add((name, saved.pop(name)))
    return found


def lost_keepers(log: Log, episodes: Sequence[Episode]) -> list[str]:
    """Messages about keepers that ended before they were asked to, without a fault on them or their
    node, and without the loss of their node, which is reported by itself.
    """
    started, home = keepers(log), homes(log)
    found = []
    for event in log.of(Kind.PROCESS_EXITED):
        name = event.data["process"]
        if name not in started or event.data["expected"]:
            continue
        node = home.get(name)
        lost = any(e.data["node"] == node and e.seq < event.seq for e in log.of(Kind.NODE_LOST))
        if not lost and not hit_before(log, episodes, event, node):
            how = (
                f"signal {event.data['signal']}"
                if event.data["signal"]
                else f"exit code {event.data['exit_code']}"
            )
            if event.data.get("hung_s") is not None:
                how += f", as it had not answered for {event.data['hung_s']} s"
            found.append(f"{name}, the keeper of node {node}, ended by itself: {how}")
    return found


def stops(log: Log) -> list[tuple[str, int, float]]:
    """(process, from, until) of each process that a fault stopped, in ns: it sent it the signal, or
    the kernel showed it as stopped. The stop lasts until the fault's heal, or indefinitely if the
    fault does not undo it.
    """
    hit = {(e.data["fault"], e.data["occurrence"]): e for e in log.of(Kind.FAULT_INJECTED)}
    ends = {
        (e.data["fault"], e.data["occurrence"]): e.time_ns
        for e in log.of(Kind.FAULT_HEALED)
        if e.data["how"] != OVER_WHEN_DONE
    }
    stopping = {
        (event.data["fault"], event.data["occurrence"])
        for event in log.of(Kind.FAULT_EFFECT, Kind.FAULT_LANDED)
        if (seen := event.data["evidence"] or {}).get("os_state") in STOPPED
        or seen.get("signal") == STOP_SIGNAL
    }
    return [
        (name, event.time_ns, ends.get(key, math.inf))
        for key, event in hit.items()
        if key in stopping
        for name in processes_hit(event)
    ]
