"""Whether there was a good reason why a fault that was injected showed no effect, or found nothing
to act on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.harness.fuzz.play.play import PlayResult
from trainchaos.harness.inject.occurrences import ENDED_BEFORE
from trainchaos.harness.judge.record.episode import processes_hit

Tree = Mapping[str, Any]
NOTICED_S = 1.0
"""A hang of so many seconds shows in the job's steps."""


def faulted_log(played: PlayResult) -> Log | None:
    """The log of the faulted arm, if there is one. Arms of real plays also have the cell and the
    repeat in their names.
    """
    named = (log for name, log in played.logs.items() if name.rpartition(".")[2] == "faulted")
    return next(named, None)


def _occurrence(event: Event) -> tuple[str, int]:
    return event.data["fault"], event.data["occurrence"]


def slight(tree: Tree, played: PlayResult) -> bool:
    """Whether a fault slows something, which may not show."""
    slow = (
        "straggler",
        "node-slow",
        "io-slow",
        "data-stall",
        "store-latency",
        "heartbeat-drop",
        "clock-skew",
    )
    return any(f["kind"] in slow or f["kind"].startswith("link-") for f in tree["faults"])


def brief(tree: Tree, played: PlayResult) -> bool:
    """Whether a rank hangs too briefly to show in the job's steps."""
    return any(f.get("params", {}).get("hold_s", 60.0) < NOTICED_S for f in tree["faults"])


def left_out_before(tree: Tree, played: PlayResult) -> bool:
    """Whether a poisoned sample had been left out when it was poisoned again."""
    log = faulted_log(played)
    if log is None:
        return False
    skipped = [(e.time_ns, set(e.data["samples"])) for e in log.of(Kind.SAMPLES_SKIPPED)]
    return any(
        skipped_ns < e.time_ns and e.data["evidence"].get("sample") in samples
        for e in log.of(Kind.FAULT_EFFECT)
        for skipped_ns, samples in skipped
    )


def displaced(tree: Tree, played: PlayResult) -> bool:
    """Whether wrong data replaced a poisoned sample in the step in which it was due."""
    log = faulted_log(played)
    if log is None:
        return False
    effects = list(log.of(Kind.FAULT_EFFECT))
    poisoned = {e.data["evidence"]["sample"] for e in effects if "sample" in e.data["evidence"]}
    shifted = {(e.actor, e.step) for e in effects if "shift" in e.data["evidence"]}
    return any(
        (batch.actor, batch.step) in shifted and not poisoned.isdisjoint(batch.data["samples"])
        for batch in log.of(Kind.BATCH_TAKEN)
    )


def thrown_away(tree: Tree, played: PlayResult) -> bool:
    """Whether values were changed, or a rank was held for a while, in a pass of a step that its
    generation, ended by another failure, never committed. How long a rank was held shows in the
    time of its step; that another fault broke the step must be seen.
    """
    log = faulted_log(played)
    if log is None:
        return False
    seen = {_occurrence(e) for e in log.of(Kind.FAULT_LANDED)}
    committed = {(e.generation, e.step) for e in log.of(Kind.STEP_COMMITTED)}
    broken = {e.generation for e in log.of(Kind.FAILURE_DETECTED)}
    held = {_occurrence(e) for e in log.of(Kind.FAULT_EFFECT) if "held_s" in e.data["evidence"]}
    hits = list(log.of(Kind.FAULT_INJECTED))
    struck = {e.generation for e in hits if _occurrence(e) in seen}
    return any(
        (
            event.data["kind"] in ("tensor-corrupt", "data-corrupt")
            or (_occurrence(event) in held and event.generation in struck)
        )
        and _occurrence(event) not in seen
        and event.generation in broken
        and (event.generation, event.step) not in committed
        for event in hits
    )


def stopped_before(tree: Tree, played: PlayResult) -> bool:
    """Whether a process that had to allocate was stopped by another fault when it was told to, and
    was killed for that: one that is stopped allocates nothing.
    """
    log = faulted_log(played)
    if log is None:
        return False
    seen = {_occurrence(e) for e in log.of(Kind.FAULT_LANDED)}
    stopped = {
        _occurrence(event)
        for event in log.of(Kind.FAULT_EFFECT)
        if event.data["evidence"].get("os_state") in ("T", "t")
    }
    killed = {e.data["process"] for e in log.of(Kind.PROCESS_EXITED) if e.data["expected"]}
    return any(
        event.data["kind"] == "oom-kill"
        and _occurrence(event) in stopped - seen
        and event.data["target"].get("process") in killed
        for event in log.of(Kind.FAULT_INJECTED)
    )


def ended_otherwise(tree: Tree, played: PlayResult) -> bool:
    """Whether each process hit by a fault without an effect was ordered to end, or was hit by
    another fault as well.
    """
    log = faulted_log(played)
    if log is None:
        return False
    failed = {
        _occurrence(e)
        for e in log.of(Kind.FAULT_FAILED)
        if str(e.data["reason"]).startswith(ENDED_BEFORE)
    }
    ordered = {e.data["process"] for e in log.of(Kind.PROCESS_EXITED) if e.data["expected"]}
    hits = [(_occurrence(e), set(processes_hit(e))) for e in log.of(Kind.FAULT_INJECTED)]
    others = ordered.union(*(names for key, names in hits if key not in failed))
    return all(names <= others for key, names in hits if key in failed)


def names_a_sample(tree: Tree, played: PlayResult) -> bool:
    """Whether the poisoned sample was chosen without regard to when it is due."""
    poisons = (f.get("params", {}) for f in tree["faults"] if f["kind"] == "poison-sample")
    return any(params.get("sample") is not None for params in poisons)


def lost_devices(tree: Tree, played: PlayResult) -> bool:
    """Whether another fault takes devices away."""
    return any(fault["kind"] == "gpu-lost" for fault in tree["faults"])


def swaps(tree: Tree, played: PlayResult) -> bool:
    """Whether a file of a checkpoint is to be swapped with another; a checkpoint written by one
    rank has no other.
    """
    return any(f.get("params", {}).get("mode") == "swap-shard" for f in tree["faults"])


def emptied(tree: Tree, played: PlayResult) -> bool:
    """Whether a fault removes data of checkpoints, so that a second fault on one may find
    nothing.
    """
    modes = [
        f.get("params", {}).get("mode") for f in tree["faults"] if f["kind"] == "checkpoint-corrupt"
    ]
    return bool({"missing", "truncate", "lose-unsynced"}.intersection(modes))


def without_ranks(tree: Tree, played: PlayResult) -> bool:
    """Whether there are more nodes than the ranks fill."""
    place = played.cell.scenario.topology if played.cell else None
    return place is not None and not all(place.ranks_on(node) for node in range(place.nodes))


def all_gone(tree: Tree, played: PlayResult) -> bool:
    """Whether, by the log, every process ever started on a node had ended or was ordered to, when a
    fault found the node empty because of earlier faults.
    """
    log = faulted_log(played)
    if log is None:
        return False
    ended = {
        e.data["process"]: min(e.time_ns, e.data.get("asked_ns") or e.time_ns)
        for e in log.of(Kind.PROCESS_EXITED)
    }
    killed = {
        (e.data["fault"], e.data["occurrence"]): e.data["target"].get("processes", ())
        for e in log.of(Kind.FAULT_INJECTED)
    }
    for hit in log.of(Kind.FAULT_EFFECT):  # reaped a moment later
        if hit.data["evidence"].get("signal") == "SIGKILL":
            key = (hit.data["fault"], hit.data["occurrence"])
            for name in killed.get(key, ()):
                ended[name] = min(hit.time_ns, ended.get(name, hit.time_ns))
    for failed in log.of(Kind.FAULT_FAILED):
        found = re.search(r"no process is on node ([\d, ]+)", str(failed.data["reason"]))
        nodes = [int(node) for node in found[1].split(",")] if found else []
        there = (
            s
            for s in log.of(Kind.PROCESS_SPAWNED)
            if s.data["node"] in nodes and s.seq < failed.seq
        )
        if any(ended.get(s.data["process"], failed.time_ns + 1) > failed.time_ns for s in there):
            return False
    return True
