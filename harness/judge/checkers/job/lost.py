"""What a job has lost, and whether its spares were enough for it."""

from __future__ import annotations

import itertools

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.harness.judge.record.kept_in_memory import PLACE, REMEMBERED, keepers


def without_need(history: History, generation: Generation) -> str:
    """What was lost up to a generation that has too few ranks, in words, where the spares that were
    promised were enough for it; "" where they were not. One that follows a part of the model takes
    the place of a rank that holds it.
    """
    spares, lost = history.info.spares, _lost(history, generation)
    words = f"after {len(lost)} losses with {spares} spares"
    if not spares:
        return words
    promised = [
        str(event.data["process"])
        for event in history.log.of(Kind.PROCESS_SPAWNED)
        if event.data["role"] == "spare"
    ][:spares]
    part = {  # nothing that was told later helped it
        str(event.data["process"]): int(event.data["shard"])
        for event in history.log.of(Kind.SPARE_PLACED)
        if event.time_ns < generation.started_ns
    }
    placed = bool(part)
    for row in history.generations:
        part |= {name: row.shard_of(rank) for rank, name in enumerate(row.members)}
    for shard in range(history.shards) if placed else ():
        # one that nothing is known of counts everywhere
        of_it = [name for name in lost if part.get(name, shard) == shard]
        if len(of_it) > sum(part.get(name, shard) == shard for name in promised):
            return ""
    return words if len(lost) <= spares else ""


def _lost(history: History, generation: Generation) -> list[str]:
    """Losses up to a generation: members that failed and left, members that had to leave a job that
    started from scratch, and spares that died, or were about to, while waiting.

    In a restart from scratch the first replica has never trained, and spares take the places of
    living members.
    """
    rows = [g for g in history.generations if g.number <= generation.number]
    members = {name for row in rows for name in row.members}
    gone = {
        e.data["process"]
        for e in history.log.of(Kind.PROCESS_EXITED, Kind.FAILURE_DETECTED)
        if e.time_ns < generation.started_ns and not e.data.get("expected")
    }
    gone -= keepers(history.log).keys()
    spares = {name for name in gone if name is not None and name not in members}
    left: list[str] = []
    for old, new in itertools.pairwise(rows):
        departed = set(old.members) - set(new.members)
        left += departed if _begins_anew(history, new) else departed & gone
    return [*spares, *left]


def _begins_anew(history: History, generation: Generation) -> bool:
    """Whether a generation was to start from scratch: nothing had been saved on disk before it.

    Checkpoints that keepers hold do not count, because they may be lost with their node: a
    coordinator that knows of no other plans for a fresh start, even if one is found later.
    """
    remembered = (generation.checkpoint or "").startswith(REMEMBERED)
    if generation.ready_ns is not None and not remembered:
        found = generation.checkpoint is not None
    else:
        found = any(
            e.time_ns < generation.started_ns and e.data.get("place") != PLACE
            for e in history.log.of(Kind.CHECKPOINT_COMMITTED)
        )
    return generation.state == "checkpoint" and not found
