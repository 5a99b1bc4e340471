"""The job's members, and whether replicas held the same state."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, passed, unknown, verdict_of
from trainchaos.harness.judge.measure.digests import final_digests, refused_states, sound_digests
from trainchaos.harness.judge.record.history import Generation, History, StepRun
from trainchaos.harness.judge.record.kept_in_memory import PLACE, keepers
from trainchaos.harness.judge.record.split import diverged
from trainchaos.harness.judge.results import Finding
from trainchaos.recovery.checkpoint.memory.header import is_memory

ALIKE = ("loss", "lr", "grad_norm", "optimizer_step", "scheduler_step")
"""What all ranks say alike of a step."""
OURS = ("gpt", "mlp")
"""Workloads known to learn in every step."""
_NOBODY = object()


def membership(evidence: Evidence) -> Finding:
    """Generations have the members, ranks and sizes that they announce; ranks and spares are as
    provisioned.

    A strategy that promises an exact result keeps the full world until it has lost more members
    than it had spares, of some part of the model where each spare follows one.
    """
    history, info = evidence.history, evidence.history.info
    if not history.generations:
        return unknown("no generation was formed")
    problems = []
    spawned = history.log.of(Kind.PROCESS_SPAWNED)
    spares = [e for e in spawned if e.data["role"] == "spare" and e.time_ns <= history.began_ns]
    if len(spares) != info.spares:
        problems.append(f"{len(spares)} spares were started, {info.spares} promised")
    first = history.generations[0].world
    if first != info.ranks:
        problems.append(f"the first generation has {first} ranks instead of {info.ranks}")
    for generation in history.generations:
        problems += _announced(evidence, generation)
    problems += [p for run in history.runs for p in _claimed(history, run)]
    sizes = " -> ".join(str(generation.world) for generation in history.generations)
    return verdict_of(problems, f"world size {sizes}, {info.spares} spares")


def _announced(evidence: Evidence, generation: Generation) -> Iterator[str]:
    history, number, world = evidence.history, generation.number, generation.world
    ranks = history.info.ranks
    if len(set(generation.members)) < world:
        yield f"generation {number} has one process twice"
    for name in generation.members:
        if history.exited_ns.get(name, math.inf) < generation.started_ns:
            yield f"generation {number} counts {name}, which is dead"
    if not 1 <= world <= ranks:
        yield f"generation {number} has {world} ranks, provisioned were {ranks}"
    shrank = world < ranks and evidence.keeps_world
    if shrank and (why := without_need(history, generation)):
        yield f"generation {number} shrank to {world} ranks {why}"
    for event in history.log.of(Kind.GROUP_FORMED):
        if event.generation == number:
            yield from _wrong_rank(generation, event)


def _claimed(history: History, run: StepRun) -> Iterator[str]:
    generation = history.generation(run.generation)
    given = [generation.ranks.get(name, _NOBODY) for name in run.done.actors] if generation else []
    if generation is None or (
        run.done.said["rank"] == given and run.done.all_say("world", generation.world)
    ):
        return
    for event in run.commits:
        yield from _wrong_rank(generation, event)


def _wrong_rank(generation: Generation, event: Event) -> Iterator[str]:
    rank, world, number = event.data["rank"], event.data["world"], generation.number
    held = generation.ranks.get(event.actor)
    if world != generation.world:
        yield (
            f"{event.actor} works in a world of {world}, generation {number} has {generation.world}"
        )
    elif held is None:
        yield f"{event.actor} joined generation {number}, of which it is not a member"
    elif held != rank:
        yield f"{event.actor} acts as rank {rank}, generation {number} gave it another"


def replica_equality(evidence: Evidence) -> Finding:
    """All ranks that hold the same part of the model hold the same parameters, optimizer and
    scheduler state after a step, and all report the same loss, learning rate, gradient norm and
    step counters. Buffers and registered objects may
    differ: loss-equality compares them with the control arm's. Excluded are ranks that the
    supervisor named at that step for a different or non-finite state.

    Random generators belong to a rank: their digest must be the same whenever that rank does that
    step in a world of that size, in this arm and in the control arm (they are derived from seed,
    rank and step).
    """
    history = evidence.history
    problems = [
        f"step {run.step}: ranks disagree on {name}"
        for run in history.runs
        for name in ALIKE
        if not _alike(run.done.said[name])
    ]
    groups: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in sound_digests(history):
        shard = event.data["rank"] % history.shards
        groups[(event.generation, event.step or 0, shard)].append(event)
    for (number, step, _), events in sorted(groups.items()):
        for part in ("parameters", "optimizer", "scheduler"):
            if len({event.data[part] for event in events}) > 1:
                problems.append(f"step {step}, generation {number}: ranks hold different {part}")
    problems += [*_generators(evidence), *_constant(evidence)]
    if problems:
        return verdict_of(problems, "")
    last = final_digests(history).get(history.committed_step, {})
    run = history.lineage.get(history.committed_step)
    named = len(diverged(history, history.committed_step))
    if run is not None:
        refused = (one for one in refused_states(history) if one.at(run.generation, run.step))
        named += len({one.process for one in refused})
    if history.outcome == "completed" and run is not None and len(last) + named < run.world:
        return unknown(f"{len(last)} of {run.world} ranks left a digest of the last step")
    if (
        not any(len(events) > 1 for events in groups.values())
        and history.info.ranks > history.shards
    ):
        return unknown(
            "no step has digests from two ranks: lower workload.checkpoint.every, or raise steps"
        )
    return passed(f"{len(groups)} sets of digests agree")


def _constant(evidence: Evidence) -> Iterator[str]:
    """Parameters or optimizer state of a rank that are the same after two different steps of one
    generation: nothing was trained, or digests leave them out. What a script trains is not known.
    """
    history, spec = evidence.history, evidence.cell.scenario.workload
    if spec.kind not in OURS:
        return
    # plain gradient descent has no state
    watched = ("parameters", *(("optimizer",) if spec.params.get("momentum") != 0 else ()))
    before: dict[tuple[int, int], Event] = {}
    for event in sound_digests(history):
        key = (event.generation, event.data["rank"])
        earlier = before.get(key, event)
        for part in watched if (earlier.step or 0) < (event.step or 0) else ():
            if earlier.data[part] == event.data[part]:
                yield (
                    f"{event.actor} holds the same {part} after step {event.step} as after step"
                    f" {earlier.step}"
                )
                return
        before[key] = event


def _alike(values: Sequence[Any]) -> bool:
    """Whether all print alike, so that they agree to the last bit. Equal floats do, but for 0."""
    first = values[0]
    if first and set(map(type, values)) == {float} and values.count(first) == len(values):
        return True
    return len({repr(value) for value in values}) == 1


def _generators(evidence: Evidence) -> Iterator[str]:
    known: dict[tuple[int, int, int], str] = {}
    for history in (evidence.control_history, evidence.history):
        for event in history.log.of(Kind.STATE_DIGEST) if history else ():
            generation = history.generation(event.generation) if history else None
            if generation is None:
                continue
            key = (event.data["rank"], event.step or 0, generation.world)
            if known.setdefault(key, event.data["rng"]) != event.data["rng"]:
                yield f"random generators of rank {key[0]} differ at step {key[1]}"


def without_need(history: History, generation: Generation) -> str:
    """What was lost up to a generation that has too few ranks, in words, where the spares that were
    promised were enough for it; "" where they were not. One that follows a part of the model takes
    the place of a rank that holds it.
    """
    log, spares, lost = history.log, history.info.spares, _lost(history, generation)
    words = f"after {len(lost)} losses with {spares} spares"
    if not spares:
        return words
    started = [e.data for e in log.of(Kind.PROCESS_SPAWNED) if e.data["role"] == "spare"]
    part = {  # nothing that was told later helped it
        str(event.data["process"]): int(event.data["shard"])
        for event in log.of(Kind.SPARE_PLACED)
        if event.time_ns < generation.started_ns
    }
    placed = bool(part)
    for row in history.generations:
        part |= {name: row.shard_of(rank) for rank, name in enumerate(row.members)}
    for shard in range(history.shards) if placed else ():
        # one that nothing is known of counts everywhere
        gone, there = (
            sum(part.get(str(name), shard) == shard for name in names)
            for names in (lost, [data["process"] for data in started[:spares]])
        )
        if gone > there:
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
    lost = [name for name in gone if name is not None and name not in members]
    for old, new in itertools.pairwise(rows):
        departed = set(old.members) - set(new.members)
        lost += departed if _begins_anew(history, new) else departed & gone
    return lost


def _begins_anew(history: History, generation: Generation) -> bool:
    """Whether a generation was to start from scratch: nothing had been saved on disk before it.

    Checkpoints that keepers hold do not count, because they may be lost with their node: a
    coordinator that knows of no other plans for a fresh start, even if one is found later.
    """
    if generation.state != "checkpoint":
        return False
    if generation.ready_ns is not None and not is_memory(generation.checkpoint or ""):
        return generation.checkpoint is None
    return not any(
        e.time_ns < generation.started_ns and e.data.get("place") != PLACE
        for e in history.log.of(Kind.CHECKPOINT_COMMITTED)
    )
