"""What the load test plays, and what is made of what its processes noted: figures with n, p50, p99
and maximum, and the page of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import markdown
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, read_actor
from trainchaos.chaos.stats import percentile

CASE_VARIABLE = "TRAINCHAOS_LOAD_CASE"
"""Environment variable with the path of the case that Locust is to play."""
CASES = ("steady", "rack", "tenth", "restart", "slow", "lying", "cuts")
"""docs/control-plane.md says what happens in each."""
GOAL_AGENTS, HEARTBEAT_MS, DECISION_MS = 2048, 50.0, 200.0
"""The goals at so many agents: p99 of a heartbeat, and from a failure to the decision."""
BEGIN = "<!-- control plane: made by python -m benchmarks.control_plane.load -->"
END = "<!-- control plane: end -->"
NONE = "–"
HEAD = (
    "case",
    "agents (ranks)",
    "heartbeat, ms: p50 / p99 / max (n)",
    "failure to decision, ms (n)",
    "regroup broadcast, ms",
    "registration, ms: p50 / p99",
    "false deaths",
    "messages/s in + out",
    "kB/s in + out",
    "cores",
    "kB an agent",
)
Results = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case at one size. ``name``: of CASES; ``agents`` of ``ranks`` ranks each, spawned at
    ``ramp`` a second; ``rack``: agents in one rack; ``beat_s``: between two heartbeats of an agent,
    and a step of the job; ``steady_s``: measured before the act, and ``hold_s`` after it;
    ``limit_s``: for each wait; ``folder``: its files; ``asks``: descriptor of a pipe on which its
    Locust process asks for a restart of the coordinator.
    """

    name: str
    agents: int
    ranks: int
    ramp: float
    rack: int
    beat_s: float
    steady_s: float
    hold_s: float
    limit_s: float
    port: int
    folder: str
    asks: int

    def file(self, name: str) -> Path:
        """Of its folder: ``token``; ``probe``, of the coordinator; ``found.json``, of Locust."""
        return Path(self.folder) / name

    def write(self) -> Path:
        """Write it for ``read``."""
        self.file("case.json").write_text(json.dumps(asdict(self)))
        return self.file("case.json")

    @staticmethod
    def read(path: Path) -> Case:
        """The case of a file. Raises ScenarioError where it is none."""
        try:
            return Case(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ScenarioError(f"{path} is no case of the load test: {error}") from error

    def struck(self) -> frozenset[int]:
        """Nodes that are killed in this case."""
        if self.name == "rack":
            return frozenset(range(self.agents - self.rack, self.agents))
        return frozenset(range(5, self.agents, 10) if self.name == "tenth" else ())


@dataclass(frozen=True, kw_only=True)
class ProcessSample:
    """A process at a monotonic time: seconds of processor time so far, and resident bytes."""

    at_s: float
    cpu_s: float
    rss: int


def summary(values: Sequence[float]) -> dict[str, float | int] | None:
    """n, p50, p99 and maximum; None of no value."""
    if not values:
        return None
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    quantiles = {name: round(percentile(values, share), 3) for name, share in shares.items()}
    return {"n": len(values), **quantiles}


def false_deaths(events: Iterable[Event], struck: frozenset[int]) -> dict[str, list[str]]:
    """Nodes that were given up, and processes that were declared to have failed, although nobody
    touched them.
    """
    where: dict[str, int] = {}
    nodes, processes = [], []
    for event in events:
        data = event.data
        match event.kind:
            case Kind.PROCESS_SPAWNED:
                where[data["process"]] = data["node"]
            case Kind.NODE_LOST if data["node"] not in struck:
                nodes.append(f"node {data['node']}: {data['why']}")
            case Kind.FAILURE_DETECTED if data["process"] is not None:
                if where.get(data["process"]) not in struck:
                    processes.append(f"{data['process']}: {data['cause']}: {data['detail']}")
    return {"nodes": nodes, "processes": processes}


def results(
    case: Case,
    found: Results,
    *,
    events: Path,
    coordinator: Sequence[ProcessSample],
    agents: Sequence[ProcessSample],
    wall_s: float,
) -> dict[str, Any]:
    """The results of a case. ``found``: by its Locust process; ``events``: directory with the
    coordinator's log; ``coordinator``, ``agents``: samples of the two processes.
    """
    marks, counted = found["marks"], found["counted"]
    begin_s, end_s = marks.get("steady", math.inf), marks["end"]
    false = false_deaths(read_actor(events / f"{ORCHESTRATOR}.jsonl").events, case.struck())
    latencies = {}
    for kind, pairs in {"heartbeat": [], "beat": [], **found["samples"]}.items():
        measured = kind in ("heartbeat", "beat")
        within = [ms for at_s, ms in pairs if not measured or begin_s <= at_s <= end_s]
        latencies[kind] = summary(within)
    traffic = None
    if first := counted.get("steady"):
        rates = {key: (counted["end"][key] - first[key]) / (end_s - begin_s) for key in first}
        traffic = {f"{key}_per_s": round(rate, 1) for key, rate in rates.items()}
    starts = [name for name in ("admitted", "trains") if name in marks]
    return {
        "case": case.name,
        "agents": case.agents,
        "ranks": case.agents * case.ranks,
        "problem": found["problem"],
        "wall_s": round(wall_s, 1),
        "start": {name: round(marks[name] - marks["begun"], 3) for name in starts},
        "latency_ms": latencies,
        "false_deaths": len(false["nodes"]) + len(false["processes"]),
        "false": {key: said[:10] for key, said in false.items()},
        "traffic": traffic,
        "coordinator": _cost(coordinator, case, marks),
        "agents_process": _cost(agents, case, marks),
        **{name: found[name] for name in ("dial_failures", "fenced", "facts")},
    }


def _cost(
    samples: Sequence[ProcessSample], case: Case, marks: Mapping[str, float]
) -> dict[str, float] | None:
    """Processor time and memory: cores while measured, bytes for each agent."""
    if not samples or "steady" not in marks:
        return None
    base, last = samples[0], samples[-1]

    def at(name: str) -> ProcessSample:
        return next((s for s in reversed(samples) if s.at_s <= marks[name]), base)

    begin, end = at("steady"), at("act")
    cost = {
        "rss_mb": round(last.rss / 1e6, 1),
        "rss_before_mb": round(base.rss / 1e6, 1),
        "rss_per_agent_kb": round((begin.rss - base.rss) / 1e3 / case.agents, 1),
        "cpu_s": round(last.cpu_s, 2),
    }
    if end.at_s > begin.at_s:
        cost["cores_steady"] = round((end.cpu_s - begin.cpu_s) / (end.at_s - begin.at_s), 3)
    return cost


# ---- the page


def rows(all_results: Sequence[Results]) -> str:
    """A table, one line a case; a case that could not be played says why."""
    return markdown(HEAD, [_row(found) for found in all_results])


def _row(found: Results) -> list[str]:
    latency, cost = found["latency_ms"], found["coordinator"] or {}
    beat, traffic = latency.get("heartbeat"), found["traffic"] or {}
    register = latency.get("register again") or latency.get("register")
    decision, broadcast = latency.get("failure to decision"), latency.get("regroup broadcast")
    problem = f" ({found['problem']})" if found["problem"] else ""
    cells = [f"{found['case']}{problem}", f"{found['agents']:,} ({found['ranks']:,})", *[NONE] * 9]
    if beat:
        cells[2] = f"{beat['p50']:.1f} / {beat['p99']:.1f} / {beat['max']:.0f} ({beat['n']:,})"
    if decision:
        cells[3] = f"{decision['p50']:.0f} ({decision['n']})"
    if broadcast:
        cells[4] = f"{broadcast['p50']:.0f}"
    if register:
        cells[5] = f"{register['p50']:.0f} / {register['p99']:.0f}"
    cells[6] = str(found["false_deaths"])
    for place, kind, unit in ((7, "messages", 1), (8, "bytes", 1e3)):
        rates = [traffic.get(f"{kind}_{way}_per_s") for way in ("in", "out")]
        cells[place] = " + ".join(f"{r / unit:,.0f}" for r in rates if r is not None) or NONE
    for place, key, form in ((9, "cores_steady", ".2f"), (10, "rss_per_agent_kb", ".0f")):
        cells[place] = format(cost[key], form) if key in cost else NONE
    return cells


def goals(all_results: Sequence[Results]) -> str:
    """Whether the goals at GOAL_AGENTS are met, a line each; a case that was not played meets
    none.
    """
    there = [found["latency_ms"] for found in all_results if found["agents"] == GOAL_AGENTS]
    lines = []
    for words, kind, key, goal in (
        ("p99 of a heartbeat at {:,}, worst case", "heartbeat", "p99", HEARTBEAT_MS),
        ("failure to decision at {:,}, worst", "failure to decision", "max", DECISION_MS),
    ):
        values = [latency[kind][key] for latency in there if latency.get(kind)]
        said = f"not measured (goal under {goal:g} ms)"
        if values:
            met = "met" if max(values) < goal else "missed"
            n = len(values)
            said = f"{max(values):.1f} ms, n={n} cases (goal under {goal:g} ms: {met})"
        lines.append(f"- {words.format(GOAL_AGENTS)}: {said}.")
    deaths = [found["false_deaths"] for found in all_results]
    return "\n".join([*lines, f"- False deaths: {sum(deaths)} in {len(deaths)} cases (goal 0)."])
