"""The places that stored logs blame for failures, and how long each was in use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, Log, read_log
from trainchaos.harness.host.rundir import open_run
from trainchaos.harness.judge.record.episodes import episodes_of, unclaimed_failures
from trainchaos.harness.judge.record.history import NS
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.recovery.checkpoint.memory import ROLE as KEEPER
from trainchaos.recovery.health.lemons import Lemon, Record, lemons
from trainchaos.recovery.health.reputation import NOT_OF_A_PLACE


@dataclass(frozen=True, kw_only=True)
class HistoryOfPlaces:
    """Records by place: nodes, and CUDA devices with their hosts. ``arms``: how many were read."""

    nodes: Mapping[str, Record]
    devices: Mapping[str, Record]
    arms: int


def read_places(paths: Sequence[Path]) -> HistoryOfPlaces:
    """What runs say of places: run directories, and ``--events`` directories of ``recovery.run``.
    Who fails together on one place has one incident. Failures that a run injected itself do not
    count, nor do simulated arms. Raises NoRun, LogError.
    """
    budget, arms = Budget(), 0
    used: dict[str, float] = defaultdict(float)
    blamed: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for folder in dict.fromkeys(each for path in paths for each in _folders(path)):
        log = read_log(folder, budget)
        failures = list(_own_failures(log))
        started = log.first(Kind.RUN_STARTED)
        if started is None or started.data.get("launcher") == "sim":
            continue
        arms += 1
        at = _places(log)
        for place, seconds in _used_s(log, at).items():
            used[place] += seconds
        for event in failures:
            for place in at.get(event.data["process"], ()):
                blamed[place].add((arms, event.generation))
    records = {
        place: Record(incidents=len(blamed[place]), used_s=used[place]) for place in sorted(used)
    }
    return HistoryOfPlaces(
        nodes={place: one for place, one in records.items() if "/" not in place},
        devices={place: one for place, one in records.items() if "/" in place},
        arms=arms,
    )


def lemons_of(history: HistoryOfPlaces, *, false_alarm: float) -> tuple[Lemon, ...]:
    """Devices and nodes with too many incidents, each kind at half of the rate of false alarms. A
    node is not named for what a device of it is named for.
    """
    found = lemons(history.devices, false_alarm=false_alarm / 2)
    nodes = dict(history.nodes)
    for one in found:
        node = one.place.partition("/")[0]
        if node in nodes:
            left = max(0, nodes[node].incidents - one.incidents)
            nodes[node] = Record(incidents=left, used_s=nodes[node].used_s)
    return (*found, *lemons(nodes, false_alarm=false_alarm / 2))


def _folders(path: Path) -> Iterator[Path]:
    if (path / f"{ORCHESTRATOR}.jsonl").is_file():
        yield path.resolve()
        return
    run = open_run(path)
    yield from (run.events(arm) for arm in run.arms())


def _own_failures(log: Log) -> Iterator[Event]:
    """Failures that blame a process and that no injected fault explains."""
    if log.first(Kind.FAULT_INJECTED) is None:
        failures = list(log.of(Kind.FAILURE_DETECTED))
    else:
        try:
            history = history_of(log)
        except LogError:
            return
        failures = unclaimed_failures(history, episodes_of(history))
    yield from (
        event
        for event in failures
        if event.data["process"] is not None and event.data["cause"] not in NOT_OF_A_PLACE
    )


def _places(log: Log) -> dict[str, tuple[str, ...]]:
    """Process -> the places that it was on: its node, and its device if that has a name."""
    spawned = [
        event
        for event in log.of(Kind.PROCESS_SPAWNED)
        if event.data["role"] != KEEPER and event.data.get("node") is not None
    ]
    names = _names(log, {event.data["node"] for event in spawned})
    found = {}
    for event in spawned:
        node = names[event.data["node"]]
        device = str(event.data.get("device") or "").partition("@")[0]
        on_it = (f"{node}/{device}",) if device.startswith("cuda:") else ()
        found[event.data["process"]] = (node, *on_it)
    return found


def _used_s(log: Log, at: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Seconds in which each place had a process on it, and not twice for two processes."""
    begins = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_SPAWNED)}
    exits = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_EXITED)}
    end_ns = max((event.time_ns for event in log.events), default=0)
    used: dict[str, float] = defaultdict(float)
    until: dict[str, int] = defaultdict(int)
    for process in sorted(at, key=lambda process: begins[process]):
        ends = exits.get(process, end_ns)
        for place in at[process]:
            used[place] += max(0, ends - max(begins[process], until[place])) / NS
            until[place] = max(until[place], ends)
    return used


def _names(log: Log, nodes: set[int]) -> dict[int, str]:
    """The name of each node as a taint has it: its host, or its number where nodes share one."""
    first = next(
        (event for event in log.by(ORCHESTRATOR) if event.kind is Kind.ACTOR_STARTED), None
    )
    here = str(first.data["host"]) if first is not None else ""
    hosts = dict.fromkeys(nodes, here)
    if first is not None and not first.data.get("emulates"):
        joined = {event.data["node"]: event.data["host"] for event in log.of(Kind.NODE_JOINED)}
        hosts |= {node: str(host) for node, host in joined.items() if node in nodes}
    several = list(hosts.values())
    return {
        node: host if several.count(host) == 1 and host else str(node)
        for node, host in hosts.items()
    }
