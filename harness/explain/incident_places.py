"""The places that stored logs blame for failures, and how long each was in use."""

from __future__ import annotations

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
from trainchaos.recovery.policy.strategy import ANNOUNCED, Cause

_NOT_OF_A_PLACE = (*ANNOUNCED, Cause.NONFINITE)
"""Causes that say nothing of the hardware, as ``recovery.run`` takes them to."""


@dataclass(frozen=True, kw_only=True)
class HistoryOfPlaces:
    """Records by place: nodes, and CUDA devices with their hosts. ``arms``: how many were read."""

    nodes: Mapping[str, Record]
    devices: Mapping[str, Record]
    arms: int


@dataclass(frozen=True, kw_only=True)
class _Use:
    """A place in an arm. ``seconds``: with a process on it; ``blamed``: (arm, generation) of its
    incidents: who fails together on one place has one incident.
    """

    seconds: float
    blamed: frozenset[tuple[int, int]]


def read_places(paths: Sequence[Path]) -> HistoryOfPlaces:
    """What runs say of places: run directories, and ``--events`` directories of ``recovery.run``.
    Failures that a run injected itself do not count, nor do simulated arms. Raises NoRun, LogError.
    """
    budget = Budget()
    nodes, devices = dict[str, list[_Use]](), dict[str, list[_Use]]()
    arms = 0
    for folder in dict.fromkeys(each for path in paths for each in _folders(path)):
        log = read_log(folder, budget)
        failures = list(_own_failures(log))
        if not _real(log):
            continue
        arms += 1
        for device, found in ((False, nodes), (True, devices)):
            for place, use in _uses(log, failures, arms, device=device).items():
                found.setdefault(place, []).append(use)
    return HistoryOfPlaces(nodes=_summed(nodes), devices=_summed(devices), arms=arms)


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


def _real(log: Log) -> bool:
    started = log.first(Kind.RUN_STARTED)
    return started is not None and started.data.get("launcher") != "sim"


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
        if event.data["process"] is not None and event.data["cause"] not in _NOT_OF_A_PLACE
    )


def _uses(log: Log, failures: Sequence[Event], arm: int, *, device: bool) -> dict[str, _Use]:
    """Each place of an arm with its use."""
    spawned = {
        event.data["process"]: event
        for event in log.of(Kind.PROCESS_SPAWNED)
        if event.data["role"] != KEEPER and event.data.get("node") is not None
    }
    names = _names(log, {event.data["node"] for event in spawned.values()})
    at = {
        process: place
        for process, event in spawned.items()
        if (place := _place(event, names, device=device)) is not None
    }
    exits = {event.data["process"]: event.time_ns for event in log.of(Kind.PROCESS_EXITED)}
    end_ns = max((event.time_ns for event in log.events), default=0)
    spans: dict[str, list[tuple[int, int]]] = {}
    for process, place in at.items():
        span = spawned[process].time_ns, exits.get(process, end_ns)
        spans.setdefault(place, []).append(span)
    blamed: dict[str, set[tuple[int, int]]] = {}
    for event in failures:
        if event.data["process"] in at:
            blamed.setdefault(at[event.data["process"]], set()).add((arm, event.generation))
    return {
        place: _Use(seconds=_covered_s(each), blamed=frozenset(blamed.get(place, ())))
        for place, each in spans.items()
    }


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


def _place(event: Event, names: Mapping[int, str], *, device: bool) -> str | None:
    name = names[event.data["node"]]
    if not device:
        return name
    its = str(event.data.get("device") or "").partition("@")[0]
    return f"{name}/{its}" if its.startswith("cuda:") else None


def _covered_s(spans: Sequence[tuple[int, int]]) -> float:
    """Seconds in which at least one span lasts; spans in ns."""
    covered = until = 0
    for begins, ends in sorted(spans):
        covered += max(0, ends - max(begins, until))
        until = max(until, ends)
    return covered / NS


def _summed(found: Mapping[str, Sequence[_Use]]) -> dict[str, Record]:
    return {
        place: Record(
            incidents=len({key for use in uses for key in use.blamed}),
            used_s=sum(use.seconds for use in uses),
        )
        for place, uses in sorted(found.items())
    }
