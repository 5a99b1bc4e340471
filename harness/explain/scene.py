"""A stripped log as a diagnosis asks it: who ran where, who failed together, what a process did."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import median

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log

TOGETHER_NS = 3_000_000_000
"""Failures of one node that are declared within so long are one: a frozen process is found out by
its silence, and the next one as it does not leave the generation, a second later.
"""
AT_ONCE_NS = 50_000_000
"""Two ends on two nodes within so long have one cause, as a rack's: independent ones would need a
failure each 50 ms.
"""
SOONER_NS = 2_000_000
"""The kernel takes longer to give back the memory of a process that trains, and to report its end;
and so does it, by a factor of two, for the others that were told to end at the same moment.
"""
_SILENT = re.compile(r"\bsilent for (\d+(?:\.\d+)?) s\b")


def silence_s(failure: Event) -> float:
    """Seconds of silence after which a failure was declared; of failures of nobody the log has
    them in words only. 0: none.
    """
    said = _SILENT.search(str(failure.data["detail"]))
    return float(failure.data.get("silent_s") or (said[1] if said else 0.0))


class Scene:
    """Questions to one arm's log. ``spawned``, ``exits``: process -> its start, its end."""

    def __init__(self, log: Log) -> None:
        self.log = log
        started = log.first(Kind.RUN_STARTED) or (log.events[0] if log.events else None)
        self.start_ns = started.time_ns if started else 0
        self.spawned = {event.data["process"]: event for event in log.of(Kind.PROCESS_SPAWNED)}
        self.exits = {event.data["process"]: event for event in log.of(Kind.PROCESS_EXITED)}

    def failure_groups(self) -> Iterator[list[Event]]:
        """Failures that were declared before the next generation trains."""
        group: list[Event] = []
        for event in self.log.of(Kind.FAILURE_DETECTED, Kind.GENERATION_READY):
            if event.kind is Kind.FAILURE_DETECTED:
                group.append(event)
            elif group:
                yield group
                group = []
        if group:
            yield group

    def nodes_lost(self, group: Sequence[Event]) -> dict[int, list[Event]]:
        """Nodes of which every process failed within ``TOGETHER_NS``, with their failures: at least
        two processes, or one at the moment at which another node lost all of its own. Only where
        the job has nodes that were not lost.
        """
        found: dict[int, list[Event]] = {}
        alone: dict[int, list[Event]] = {}
        unsaid = self._gone_unsaid(group[0])
        for node in self._nodes:
            failed = [event for event in group if self._node_of(event.data["process"]) == node]
            first = failed[0] if failed else group[0]
            near = [e for e in failed if e.time_ns - first.time_ns <= TOGETHER_NS]
            there = self._living(node, first.time_ns)
            lost = {event.data["process"] for event in near} | unsaid
            if there and there <= lost:
                several = len(there) > 1 or self._announced_gone(node, first.time_ns)
                (found if several else alone)[node] = near or [first]
        ends = [event.time_ns for near in (*alone.values(), *found.values()) for event in near[:1]]
        found |= {
            node: near
            for node, near in alone.items()
            if sum(abs(near[0].time_ns - end) <= AT_ONCE_NS for end in ends) > 1
        }
        return dict(sorted(found.items())) if len(found) < len(self._nodes) else {}

    def _gone_unsaid(self, failure: Event) -> set[str]:
        """Processes that were told to end because of a failure, and had ended by themselves: their
        end was seen sooner than the kernel takes to end a process.
        """
        if failure.data["cause"] != "exit":
            return set()
        took = {
            name: event.time_ns - asked
            for name, event in self.exits.items()
            if type(asked := event.data.get("asked_ns")) is int
            and 0 <= asked - failure.time_ns <= AT_ONCE_NS
        }
        limit = min(SOONER_NS, median(took.values()) / 2) if took else 0
        return {name for name, nanoseconds in took.items() if nanoseconds < limit}

    def _announced_gone(self, node: int, time_ns: int) -> bool:
        return any(
            event.data["node"] == node and abs(event.time_ns - time_ns) <= TOGETHER_NS
            for event in self.log.of(Kind.NODE_LOST)
        )

    @cached_property
    def _nodes(self) -> list[int]:
        named = (event.data.get("node") for event in self.spawned.values())
        return sorted({node for node in named if type(node) is int})

    def _node_of(self, process: str | None) -> int | None:
        event = self.spawned.get(process) if process is not None else None
        return event.data.get("node") if event is not None else None

    def _living(self, node: int, time_ns: int) -> set[str]:
        """Workers and spares on a node that were ready and had not ended just before."""
        ready = {e.data["process"] for e in self.log.of(Kind.PROCESS_READY) if e.time_ns < time_ns}
        gone = {name for name in ready if self._gone(name, time_ns - TOGETHER_NS // 10 - 1)}
        return {name for name in ready - gone if self._node_of(name) == node}

    def _gone(self, process: str, time_ns: int) -> bool:
        event = self.exits.get(process)
        return event is not None and event.time_ns <= time_ns

    def node_of_all(self, ranks: Sequence[int], time_ns: int) -> int | None:
        """The node whose ranks are exactly these; None: there is none, or it has one rank only."""
        by_node: dict[int | None, set[int]] = defaultdict(set)
        for rank, process in enumerate(self._members(time_ns)):
            by_node[self._node_of(process)].add(rank)
        if len(by_node) < 2 or len(ranks) < 2:
            return None
        return next((node for node, there in by_node.items() if there == {*ranks}), None)

    def _members(self, time_ns: int) -> Sequence[str]:
        started = [e for e in self.log.of(Kind.GENERATION_STARTED) if e.time_ns <= time_ns]
        return started[-1].data["members"] if started else ()

    def all_worked_on(self, failure: Event) -> bool:
        """Whether all members did; who was taken for silent is not known."""
        members = self._members(failure.time_ns)
        return bool(members) and all(self.worked_on(failure, name) for name in members)

    def worked_on(self, failure: Event, process: str | None = None) -> bool:
        """Whether a process, by default the one that is blamed, committed two steps in the silence
        it was blamed for: the second began in it. One may just have begun it.
        """
        since = failure.time_ns - 1e9 * silence_s(failure)
        steps = {
            event.step
            for event in self.log.by(process or str(failure.data["process"]))
            if event.kind is Kind.STEP_COMMITTED and since < event.time_ns <= failure.time_ns
        }
        return len(steps) > 1

    def last_error(self, process: str | None, time_ns: int) -> Event | None:
        """The last error that a process reported, by then."""
        errors = [e for e in self.log.by(process or "") if e.kind is Kind.ERROR_RAISED]
        return next((e for e in reversed(errors) if e.time_ns <= time_ns), None)

    def had_notice(self, failure: Event) -> bool:
        """Whether its process had been told to end, which is then the incident."""
        return any(
            event.data["cause"] == "notice" and event.data["process"] == failure.data["process"]
            for event in self.log.of(Kind.FAILURE_DETECTED)
            if event.time_ns < failure.time_ns
        )

    def skipped_after(self, failure: Event) -> bool:
        """Whether samples of its step or later were left out, because no rank can compute them."""
        return any(event.time_ns >= failure.time_ns for event in self.log.of(Kind.SAMPLES_SKIPPED))

    def saving(self, ended: Event) -> str | None:
        """The checkpoint that a process had begun and not ended when it was gone."""
        begun: str | None = None
        for event in self.log.by(ended.data["process"]):
            if event.kind is Kind.CHECKPOINT_SAVING:
                begun = str(event.data["checkpoint"])
            elif event.kind in (Kind.CHECKPOINT_COMMITTED, Kind.CHECKPOINT_FAILED):
                begun = None
        return begun

    def device_left(self, ended: Event) -> str | None:
        """The device of a process that ended, if processes were started after it, and on another
        device that was taken or new, although this one was free.
        """
        start = self.spawned.get(ended.data["process"])
        device = start.data.get("device") if start is not None else None
        later = [e for e in self.spawned.values() if e.time_ns > ended.time_ns]
        devices = {event.data.get("device") for event in later}
        if device is None or not later or device in devices:
            return None
        at_ns = later[0].time_ns
        taken = {
            event.data.get("device")
            for name, event in self.spawned.items()
            if event.time_ns < at_ns and not self._gone(name, at_ns)
        }
        known = {e.data.get("device") for e in self.spawned.values() if e.time_ns < ended.time_ns}
        return device if devices & taken or later[0].data.get("device") not in known else None
