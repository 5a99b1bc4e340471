"""What the log says of checkpoints in memory: which are held by a keeper that lives, and so have to
be found again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from chaos.events.log import Event, Kind, Log
from chaos.fault.aftermath import OVER_WHEN_DONE
from harness.judge.record.episode import Episode
from harness.judge.record.node_attribution import homes, nodes_hit
from recovery.checkpoint.memory import KEPT, ROLE

PLACE = "memory"
REMEMBERED = "memory-"
"""What the name of a checkpoint in memory begins with."""
STOPPED = ("T", "t")


def keepers(log: Log) -> dict[str, Event]:
    """Processes that keep checkpoints in memory, by name, with their start."""
    return {
        event.data["process"]: event
        for event in log.of(Kind.PROCESS_SPAWNED)
        if event.data["role"] == ROLE
    }


def held_in_memory(
    log: Log,
    *,
    since_ns: int,
    until_ns: int,
    before: int,
    in_doubt: Callable[[Event, int, int], bool],
) -> dict[str, int]:
    """Checkpoints in memory that generations ``before`` this one acknowledged by ``until_ns`` and
    of which some keeper that lives then holds every shard: name -> step.

    One that was refused since as damaged does not count, nor one that was let go of, if it was
    ``in_doubt`` (the line that says so, its step, the generation that saved it), nor one that made
    room for as many newer ones as keepers hold, whatever these are worth, and acknowledged or not.
    Nor does what a keeper holds that was stopped at any time from ``since_ns`` to then: it does not
    answer.

    A keeper holds what a rank of its node saved, and what such an event names its node for as
    having a copy; a keeper that ended has let everything go, and who follows it on the node begins
    with nothing.
    """
    silent = _stopped(log, since_ns, until_ns)
    lives = [life[1:] for life in _lives(log) if life[0] not in silent]
    nodes = {e.data["process"]: e.data.get("node") for e in log.of(Kind.PROCESS_SPAWNED)}
    said: dict[tuple[str, int], set[int]] = defaultdict(set)
    held: dict[tuple[str, int], set[int]] = defaultdict(set)
    wanted: dict[tuple[str, int], tuple[int, int]] = {}
    unsaid = _kept_unsaid(log, until_ns)
    for event in _lines(log, until_ns):
        name = event.data["checkpoint"]
        key = (name, event.generation)
        if event.kind in (Kind.CHECKPOINT_REFUSED, Kind.CHECKPOINT_DELETED):
            refused = event.kind is Kind.CHECKPOINT_REFUSED
            for key in [key for key in wanted if key[0] == name]:
                if refused or in_doubt(event, wanted[key][0], key[1]):
                    del wanted[key]
            continue
        acknowledged = event.kind is Kind.CHECKPOINT_COMMITTED
        if event.generation >= before or not (acknowledged or key in unsaid):
            continue
        wanted[key] = (event.step or 0, event.data["shards"])
        if acknowledged:
            holders = {nodes.get(event.actor), *event.data["copies"]}
            if any(
                node in holders and start <= event.time_ns and until_ns < end
                for node, start, end in lives
            ):
                held[key].add(event.data["shard"])
        said[key].add(event.data["shard"])
        whole = sorted(
            (k[1], step, k) for k, (step, shards) in wanted.items() if len(said[k]) == shards
        )
        for _, _, older in whole[:-KEPT]:
            del wanted[older]
    return {key[0]: step for key, (step, shards) in wanted.items() if len(held[key]) == shards}


def _lines(log: Log, until_ns: int) -> Iterator[Event]:
    """What is said of checkpoints in memory up to then."""
    for event in log.of(
        Kind.CHECKPOINT_SAVING,
        Kind.CHECKPOINT_COMMITTED,
        Kind.CHECKPOINT_REFUSED,
        Kind.CHECKPOINT_DELETED,
    ):
        if event.data.get("place") == PLACE and event.time_ns <= until_ns:
            yield event


def _kept_unsaid(log: Log, until_ns: int) -> set[tuple[str, int]]:
    """Saves that were never acknowledged, as their generation ended first, and that keepers held
    all the same, since they were let go of by name: name and generation.
    """
    saved: dict[str, int] = {}
    found: set[tuple[str, int]] = set()
    for event in _lines(log, until_ns):
        name = event.data["checkpoint"]
        if event.kind is Kind.CHECKPOINT_SAVING:
            saved[name] = event.generation
        elif event.kind is Kind.CHECKPOINT_COMMITTED:
            saved.pop(name, None)
        elif event.kind is Kind.CHECKPOINT_DELETED and name in saved:
            found.add((name, saved.pop(name)))
    return found


def lost_keepers(log: Log, episodes: Iterable[Episode]) -> list[str]:
    """Keepers that ended before they were asked to, and no fault on them or their node explains it,
    nor the loss of their node, which has its own account. In words.
    """
    started = keepers(log)
    home, hit = (
        homes(log),
        [(episode.injected, nodes_hit(episode, homes(log))) for episode in episodes],
    )
    found = []
    for event in log.of(Kind.PROCESS_EXITED):
        name = event.data["process"]
        if name not in started or event.data["expected"]:
            continue
        node = home.get(name)
        struck = any(
            injected and injected.time_ns <= event.time_ns and node in nodes
            for injected, nodes in hit
        )
        lost = any(e.data["node"] == node and e.seq < event.seq for e in log.of(Kind.NODE_LOST))
        if not struck and not lost:
            how = (
                f"signal {event.data['signal']}"
                if event.data["signal"]
                else f"exit code {event.data['exit_code']}"
            )
            found.append(f"{name}, the keeper of node {node}, ended by itself: {how}")
    return found


def _stopped(log: Log, since_ns: int, until_ns: int) -> set[str]:
    """Processes that the kernel showed as stopped by a fault, at any time between: until its heal,
    or for good where it leaves them so.
    """
    hit = {(e.data["fault"], e.data["occurrence"]): e for e in log.of(Kind.FAULT_INJECTED)}
    ends = {
        (e.data["fault"], e.data["occurrence"]): e.time_ns
        for e in log.of(Kind.FAULT_HEALED)
        if e.data["how"] != OVER_WHEN_DONE
    }
    found: set[str] = set()
    for event in log.of(Kind.FAULT_LANDED):
        key = event.data["fault"], event.data["occurrence"]
        if (event.data["evidence"] or {}).get("os_state") not in STOPPED or key not in hit:
            continue
        if hit[key].time_ns <= until_ns and ends.get(key, until_ns) >= since_ns:
            target = hit[key].data["target"] or {}
            several = target.get("processes")
            found |= {str(target.get("process")), *(several if isinstance(several, list) else ())}
    return found


def _lives(log: Log) -> list[tuple[str, int | None, int, int]]:
    """Name, node, start and end of each keeper."""
    ends = {e.data["process"]: e.time_ns for e in log.of(Kind.PROCESS_EXITED)}
    return [
        (name, start.data.get("node"), start.time_ns, ends.get(name, 2**63))
        for name, start in keepers(log).items()
    ]
