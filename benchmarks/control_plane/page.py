"""The table of all cases, written between two marks of a page, with date and machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.control_plane.measure import DECISION_MS, HEARTBEAT_MS
from trainchaos.chaos.errors import ScenarioError

BEGIN = "<!-- control plane: made by python -m benchmarks.control_plane.load -->"
END = "<!-- control plane: end -->"
GOAL_AGENTS = 2048
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
NONE = "–"


def rows(all_results: Sequence[Mapping[str, Any]]) -> str:
    """A table in Markdown, one line a case; a case that could not be played says why."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    lines += ["| " + " | ".join(_row(each)) + " |" for each in all_results]
    return "\n".join(lines)


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    latency, traffic, cost = (
        found["latency_ms"],
        found["traffic"] or {},
        found["coordinator"] or {},
    )
    beat = latency.get("heartbeat")
    register = latency.get("register again") or latency.get("register")
    rates = [traffic.get(f"{kind}_per_s") for kind in ("messages_in", "messages_out")]
    sizes = [traffic.get(f"{kind}_per_s") for kind in ("bytes_in", "bytes_out")]
    problem = f" ({found['problem']})" if found["problem"] else ""
    return (
        f"{found['case']}{problem}",
        f"{found['agents']:,} ({found['ranks']:,})",
        f"{beat['p50']:.1f} / {beat['p99']:.1f} / {beat['max']:.0f} ({beat['n']:,})"
        if beat
        else NONE,
        _one(latency.get("failure to decision"), counted=True),
        _one(latency.get("regroup broadcast")),
        f"{register['p50']:.0f} / {register['p99']:.0f}" if register else NONE,
        str(found["false_deaths"]),
        " + ".join(f"{rate:,.0f}" for rate in rates if rate is not None) or NONE,
        " + ".join(f"{size / 1e3:,.0f}" for size in sizes if size is not None) or NONE,
        f"{cost['cores_steady']:.2f}" if "cores_steady" in cost else NONE,
        f"{cost['rss_per_agent_kb']:.0f}" if "rss_per_agent_kb" in cost else NONE,
    )


def _one(summary: Mapping[str, Any] | None, *, counted: bool = False) -> str:
    if summary is None:
        return NONE
    return f"{summary['p50']:.0f}" + (f" ({summary['n']})" if counted else "")


def goals(all_results: Sequence[Mapping[str, Any]]) -> str:
    """Whether the goals at GOAL_AGENTS are met, a line each; a case that was not played meets
    none.
    """
    there = [each for each in all_results if each["agents"] == GOAL_AGENTS]
    beats = [b["p99"] for each in there if (b := each["latency_ms"].get("heartbeat"))]
    decisions = [d["max"] for each in there if (d := each["latency_ms"].get("failure to decision"))]
    deaths = [each["false_deaths"] for each in all_results]
    return "\n".join(
        (
            _goal(f"p99 of a heartbeat at {GOAL_AGENTS:,}, worst case", beats, HEARTBEAT_MS),
            _goal(f"failure to decision at {GOAL_AGENTS:,}, worst", decisions, DECISION_MS),
            f"- False deaths: {sum(deaths)} in {len(deaths)} cases (goal 0).",
        )
    )


def _goal(what: str, values: Sequence[float], goal: float) -> str:
    if not values:
        return f"- {what}: not measured (goal under {goal:g} ms)."
    met = "met" if max(values) < goal else "missed"
    return f"- {what}: {max(values):.1f} ms, n={len(values)} cases (goal under {goal:g} ms: {met})."


def machine() -> str:
    """The machine, in words that name nobody: processor, cores that we may use, kernel, load."""
    name = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    busy = os.getloadavg()[0]
    return f"{name}, {cores} cores, Linux {platform.release()}, load {busy:.1f} before"


def write(page: Path, all_results: Sequence[Mapping[str, Any]], *, on: str, commit: str) -> None:
    """Put the table between the marks of a page. Raises ScenarioError where it has none, or cannot
    be written.
    """
    try:
        text = page.read_text()
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ScenarioError(f"{page} lacks the lines {BEGIN} and {END}")
        said = f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}; {on}."
        made = "\n\n".join((said, goals(all_results), rows(all_results)))
        page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
    except OSError as error:
        raise ScenarioError(f"cannot write {page}: {error.strerror}") from error
