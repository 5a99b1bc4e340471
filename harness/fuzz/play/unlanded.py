"""Whether there was a good reason why a fault that was injected showed no effect, or found nothing
to act on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.harness.fuzz.play.play import PlayResult
from trainchaos.harness.inject.occurrences import ENDED_BEFORE
from trainchaos.harness.judge.record.episode import processes_hit

Tree = Mapping[str, Any]
NOTICED_S = 1.0
"""A hang of so many seconds shows in the job's steps."""
SLOW = (
    *("straggler", "node-slow", "io-slow", "data-stall", "store-latency", "heartbeat-drop"),
    "clock-skew",
)
"""Kinds that slow something; those of links do so too."""
LOSES = {"missing", "truncate", "lose-unsynced"}
"""Modes of a fault that remove data of a checkpoint."""
SECONDS = re.compile(r"no_committed_step_for > ([\d.]+)s")


class NoLog(Exception):
    """The faulted arm has no readable log."""


@dataclass(frozen=True)
class Case:
    """A scenario that was played, as conditions look at it."""

    tree: Tree
    played: PlayResult

    def holds(self, condition: Callable[[Case], bool]) -> bool:
        """Whether a condition is true; one on a log that is not there is not."""
        try:
            return condition(self)
        except NoLog:
            return False

    @cached_property
    def log(self) -> Log:
        """Of the faulted arm. Arms of real plays also have the cell and the repeat in their names.
        Raises NoLog.
        """
        for name, log in self.played.logs.items():
            if name.rpartition(".")[2] == "faulted":
                return log
        raise NoLog

    @property
    def kinds(self) -> set[str]:
        """Of its faults."""
        return {fault["kind"] for fault in self.tree["faults"]}

    @property
    def params(self) -> list[Mapping[str, Any]]:
        """Of its faults."""
        return [fault.get("params", {}) for fault in self.tree["faults"]]

    @property
    def limits_s(self) -> list[float]:
        """Times without a step after which the job is given up."""
        rules = (SECONDS.search(str(rule["when"])) for rule in self.tree["stop_conditions"])
        return [float(rule[1]) for rule in rules if rule]

    @property
    def began_ns(self) -> int:
        """Since when the last supervisor has supervised; 0: from the start."""
        return max((e.time_ns for e in self.log.of(Kind.COORDINATOR_ADOPTED)), default=0)

    @cached_property
    def landed(self) -> set[tuple[str, int]]:
        """Occurrences that landed."""
        return {occurrence(e) for e in self.log.of(Kind.FAULT_LANDED)}


def occurrence(event: Event) -> tuple[str, int]:
    """Which fault, and which time."""
    return event.data["fault"], event.data["occurrence"]


def slight(case: Case) -> bool:
    """Whether a fault slows something, which may not show."""
    return any(kind in SLOW or kind.startswith("link-") for kind in case.kinds)


def brief(case: Case) -> bool:
    """Whether a rank hangs too briefly to show in the job's steps."""
    return any(params.get("hold_s", 60.0) < NOTICED_S for params in case.params)


def left_out_before(case: Case) -> bool:
    """Whether a poisoned sample had been left out when it was poisoned again."""
    skipped = [(e.time_ns, set(e.data["samples"])) for e in case.log.of(Kind.SAMPLES_SKIPPED)]
    return any(
        skipped_ns < e.time_ns and e.data["evidence"].get("sample") in samples
        for e in case.log.of(Kind.FAULT_EFFECT)
        for skipped_ns, samples in skipped
    )


def displaced(case: Case) -> bool:
    """Whether wrong data replaced a poisoned sample in the step in which it was due."""
    effects = list(case.log.of(Kind.FAULT_EFFECT))
    poisoned = {e.data["evidence"]["sample"] for e in effects if "sample" in e.data["evidence"]}
    shifted = {(e.actor, e.step) for e in effects if "shift" in e.data["evidence"]}
    return any(
        (batch.actor, batch.step) in shifted and not poisoned.isdisjoint(batch.data["samples"])
        for batch in case.log.of(Kind.BATCH_TAKEN)
    )


def thrown_away(case: Case) -> bool:
    """Whether values were changed, or a rank was held for a while, in a pass of a step that its
    generation, ended by another failure, never committed. How long a rank was held shows in the
    time of its step; that another fault broke the step must be seen.
    """
    log = case.log
    committed = {(e.generation, e.step) for e in log.of(Kind.STEP_COMMITTED)}
    broken = {e.generation for e in log.of(Kind.FAILURE_DETECTED)}
    held = {occurrence(e) for e in log.of(Kind.FAULT_EFFECT) if "held_s" in e.data["evidence"]}
    hits = list(log.of(Kind.FAULT_INJECTED))
    struck = {e.generation for e in hits if occurrence(e) in case.landed}
    return any(
        (
            event.data["kind"] in ("tensor-corrupt", "data-corrupt")
            or (occurrence(event) in held and event.generation in struck)
        )
        and occurrence(event) not in case.landed
        and event.generation in broken
        and (event.generation, event.step) not in committed
        for event in hits
    )


def stopped_before(case: Case) -> bool:
    """Whether a process that had to allocate was stopped by another fault when it was told to, and
    was killed for that: one that is stopped allocates nothing.
    """
    log = case.log
    stopped = {
        occurrence(event)
        for event in log.of(Kind.FAULT_EFFECT)
        if event.data["evidence"].get("os_state") in ("T", "t")
    }
    killed = {e.data["process"] for e in log.of(Kind.PROCESS_EXITED) if e.data["expected"]}
    return any(
        event.data["kind"] == "oom-kill"
        and occurrence(event) in stopped - case.landed
        and event.data["target"].get("process") in killed
        for event in log.of(Kind.FAULT_INJECTED)
    )


def ended_otherwise(case: Case) -> bool:
    """Whether each process hit by a fault without an effect was ordered to end, or was hit by
    another fault as well.
    """
    log = case.log
    failed = {
        occurrence(e)
        for e in log.of(Kind.FAULT_FAILED)
        if str(e.data["reason"]).startswith(ENDED_BEFORE)
    }
    ordered = {e.data["process"] for e in log.of(Kind.PROCESS_EXITED) if e.data["expected"]}
    hits = [(occurrence(e), set(processes_hit(e))) for e in log.of(Kind.FAULT_INJECTED)]
    others = ordered.union(*(names for key, names in hits if key not in failed))
    return all(names <= others for key, names in hits if key in failed)


def names_a_sample(case: Case) -> bool:
    """Whether the poisoned sample was chosen without regard to when it is due."""
    return any(
        fault["kind"] == "poison-sample" and fault.get("params", {}).get("sample") is not None
        for fault in case.tree["faults"]
    )


def lost_devices(case: Case) -> bool:
    """Whether another fault takes devices away."""
    return "gpu-lost" in case.kinds


def swaps(case: Case) -> bool:
    """Whether a file of a checkpoint is to be swapped with another; a checkpoint written by one
    rank has no other.
    """
    return any(params.get("mode") == "swap-shard" for params in case.params)


def emptied(case: Case) -> bool:
    """Whether a fault removes data of checkpoints, so that a second fault on one may find
    nothing.
    """
    faults = [fault for fault in case.tree["faults"] if fault["kind"] == "checkpoint-corrupt"]
    return any(fault.get("params", {}).get("mode") in LOSES for fault in faults)


def without_ranks(case: Case) -> bool:
    """Whether there are more nodes than the ranks fill."""
    cell = case.played.cell
    place = cell.scenario.topology if cell else None
    return place is not None and not all(place.ranks_on(node) for node in range(place.nodes))


def all_gone(case: Case) -> bool:
    """Whether, by the log, every process ever started on a node had ended or was ordered to, when a
    fault found the node empty because of earlier faults.
    """
    log = case.log
    ended = {
        e.data["process"]: min(e.time_ns, e.data.get("asked_ns") or e.time_ns)
        for e in log.of(Kind.PROCESS_EXITED)
    }
    killed = {
        occurrence(e): e.data["target"].get("processes", ()) for e in log.of(Kind.FAULT_INJECTED)
    }
    for hit in log.of(Kind.FAULT_EFFECT):  # reaped a moment later
        if hit.data["evidence"].get("signal") == "SIGKILL":
            for name in killed.get(occurrence(hit), ()):
                ended[name] = min(hit.time_ns, ended.get(name, hit.time_ns))
    for failed in log.of(Kind.FAULT_FAILED):
        found = re.search(r"no process is on node ([\d, ]+)", str(failed.data["reason"]))
        nodes = [int(node) for node in found[1].split(",")] if found else []
        for started in log.of(Kind.PROCESS_SPAWNED):
            there = started.data["node"] in nodes and started.seq < failed.seq
            if there and ended.get(started.data["process"], math.inf) > failed.time_ns:
                return False
    return True
