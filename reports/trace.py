"""``trace.json``: the run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

One process per arm, starting at zero, so that arms can be compared side by side. One thread per
actor and lane; complete events of a lane never overlap, as the viewers require. Times are in
microseconds.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, Log
from trainchaos.chaos.files import replacing
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.reports.content.facts import struck
from trainchaos.reports.content.series import healed_of, log_of, observed, start_ns

PHASES = ("data", "forward", "backward", "collective", "optimizer")
# Importers become slow beyond some hundred megabytes; a larger arm keeps only the lanes without
# steps.
MAX_STEP_EVENTS = 500_000
_LANES = ("recovery", "generations", "steps", "phases", "state", "busy")
_STATE = {
    Kind.GROUP_FORMED: "form group",
    Kind.STATE_READY: "get state",
    Kind.CHECKPOINT_COMMITTED: "save checkpoint",
}


@dataclass(frozen=True, kw_only=True)
class TraceSpan:
    """A span of time on one lane, in microseconds since the arm began."""

    name: str
    start: float
    end: float
    args: Mapping[str, Any] = field(default_factory=dict)


Lane = tuple[str, str]


def render(run: RunDirectory, results: Results) -> Path:
    """Write ``trace.json`` and return its path. An arm without a log shows only its recovery
    phases.
    """
    path = run.root / "trace.json"
    left = MAX_STEP_EVENTS
    with replacing(path) as stream, TextIOWrapper(stream, encoding="utf-8") as out:
        simulated = '"otherData":{"simulated":"true"},' if results.simulated else ""
        out.write(f'{{"displayTimeUnit":"ms",{simulated}"traceEvents":[')
        separator = "\n"
        for pid, arm in enumerate(results.arms, start=1):
            log = log_of(run, arm)
            lanes = _lanes(log, arm, results, left)
            left -= sum(len(spans) for (_, lane), spans in lanes.items() if lane in _LANES[2:4])
            first = {"ph": "M", "name": "process_sort_index", "args": {"sort_index": pid}}
            for record in (first, *_tracks(arm, lanes), *_faults(results, arm, log), *_news(log)):
                line = {"pid": pid, "tid": 0, **record}
                out.write(separator + json.dumps(_json(line), separators=(",", ":")))
                separator = ",\n"
        out.write("\n]}\n")
    return path


def _lanes(
    log: Log | None, arm: ArmResult, results: Results, left: int
) -> dict[Lane, list[TraceSpan]]:
    """All spans of an arm by (actor, lane); clipped so that none overlap within a lane."""
    lanes: dict[Lane, list[TraceSpan]] = defaultdict(list)
    args: dict[str, Any]
    for i in struck(results, arm):
        for phase in i.phases:
            start = (i.injected_s + phase.start) * 1e9
            args = {"fault": i.fault, "decision": i.decision}
            span = _span(phase.name, start, start + phase.seconds * 1e9, args)
            lanes[ORCHESTRATOR, "recovery"].append(span)
    if log is not None:
        zero = start_ns(log)
        lanes[ORCHESTRATOR, "generations"] = list(_generations(log, zero))
        for event in log.of(*_STATE):
            told = {key: value for key, value in event.data.items() if key != "seconds"}
            args = {**told, "step": event.step}
            span = _ending(_STATE[event.kind], event, zero, float(event.data["seconds"]), args)
            lanes[event.actor, "state"].append(span)
        for actor, span in _busy(log, zero):
            lanes[actor, "busy"].append(span)
        # the steps of a command are known only from its observer
        runs = history_of(log).runs[: max(0, left)] if observed(log) else ()
        for run in runs:
            args = {"generation": run.generation, "loss": run.loss}
            span = _span(f"step {run.step}", run.start_ns - zero, run.end_ns - zero, args)
            lanes[ORCHESTRATOR, "steps"].append(span)
        commits = list(log.of(Kind.STEP_COMMITTED))
        for event in commits if len(commits) * (len(PHASES) + 1) <= left else ():
            whole, *phases = _step(event, zero)
            lanes[event.actor, "steps"].append(whole)
            lanes[event.actor, "phases"] += phases
    order = sorted(lanes, key=lambda one: (one[0] != ORCHESTRATOR, one[0], _LANES.index(one[1])))
    return {lane: clip(lanes[lane]) for lane in order if lanes[lane]}


def clip(spans: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Spans sorted by start, each cut to begin when the previous one ended; empty spans are
    removed.
    """
    kept: list[TraceSpan] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        start = max(span.start, kept[-1].end if kept else 0.0)
        if span.end > start:
            kept.append(replace(span, start=start))
    return kept


def _span(name: str, start_ns: float, end_ns: float, args: Mapping[str, Any]) -> TraceSpan:
    return TraceSpan(name=name, start=start_ns / 1e3, end=end_ns / 1e3, args=args)


def _ending(
    name: str, event: Event, zero: int, seconds: float, args: Mapping[str, Any]
) -> TraceSpan:
    """What took ``seconds`` until the event."""
    end = event.time_ns - zero
    return _span(name, end - seconds * 1e9, end, args)


def _step(event: Event, zero: int) -> Iterator[TraceSpan]:
    """A step, then its phases one after the other, the last one ending when it was committed."""
    spent = {
        name: float(value)
        for name, value in event.data["seconds"].items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    total = sum(spent.values())
    told = {"loss": event.data["loss"], "rank": event.data["rank"]}
    args = {"generation": event.generation, **told}
    yield _ending(f"step {event.step}", event, zero, total, args)
    start = event.time_ns - zero - total * 1e9
    for name in [*(p for p in PHASES if p in spent), *(p for p in spent if p not in PHASES)]:
        end = start + spent[name] * 1e9
        yield _span(name, start, end, {"step": event.step})
        start = end


def _busy(log: Log, zero: int) -> Iterator[tuple[str, TraceSpan]]:
    """(actor, span) of reported activities besides training; without a reported end, up to the end
    of the process or log. Of a command, the actor is the rank named by the observer.
    """
    begun: dict[str, list[Event]] = defaultdict(list)

    def over(actor: str, events: Iterable[Event], end: Event) -> Iterator[tuple[str, TraceSpan]]:
        for one in events:
            what = str(one.data["what"])
            yield actor, _span(what, one.time_ns - zero, end.time_ns - zero, one.data)

    for event in log.of(Kind.BUSY, Kind.BUSY_ENDED, Kind.PROCESS_EXITED):
        if event.kind is Kind.PROCESS_EXITED:
            process = event.data["process"]
            yield from over(process, begun.pop(process, []), event)
            continue
        who = event.actor if event.actor != ORCHESTRATOR else f"rank {event.data['rank']}"
        doing = begun[who]
        if event.kind is Kind.BUSY:
            doing.append(event)
        elif same := [one for one in doing if one.data["what"] == event.data["what"]]:
            doing.remove(same[-1])
            yield from over(who, same[-1:], event)
    for who, left in begun.items():
        yield from over(who, left, log.events[-1])


def _generations(log: Log, zero: int) -> Iterator[TraceSpan]:
    """From each generation's start to the next one's, the last to the end of the log."""
    started = list(log.of(Kind.GENERATION_STARTED))
    ends = [*(e.time_ns for e in started[1:]), log.events[-1].time_ns]
    for event, end in zip(started, ends, strict=False):  # no generation began: one end too many
        args = {key: event.data[key] for key in ("members", "state", "source", "cause")}
        name = f"generation {event.generation}"
        yield _span(name, event.time_ns - zero, end - zero, args)


def _tracks(arm: ArmResult, lanes: Mapping[Lane, list[TraceSpan]]) -> Iterator[dict[str, Any]]:
    """Names of the process and its threads, and their spans."""

    def named(tid: int, what: str, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "tid": tid, "args": args}

    home = {name: f" (node {one.node}, {one.host})" for one in arm.nodes for name in one.processes}
    yield named(0, "process_name", name=arm.id)
    if bound := max((one.clock_bound_s for one in arm.nodes), default=0.0):
        yield named(0, "process_labels", labels=f"clocks right to ±{bound * 1e3:.3g} ms")
    for tid, ((actor, lane), spans) in enumerate(lanes.items(), start=1):
        yield named(tid, "thread_name", name=f"{actor}{home.get(actor, '')} {lane}")
        yield named(tid, "thread_sort_index", sort_index=tid)
        for span in spans:
            start, end = round(span.start, 3), round(span.end, 3)
            times = {"ts": start, "dur": round(end - start, 3)}
            yield {"ph": "X", "name": span.name, "cat": lane, "tid": tid, **times} | {
                "args": span.args
            }


def _faults(results: Results, arm: ArmResult, log: Log | None) -> Iterator[dict[str, Any]]:
    """Each incident, until the later of recovery and heal, else the end of the arm."""
    healed = healed_of(log) if log else {}
    for i in struck(results, arm):
        end = i.injected_s + (i.recovery_time or 0.0) if not i.never_recovered else arm.wall_s
        over = [healed.get((i.fault, number), 0.0) for number in i.occurrences]
        common = {
            "name": f"{i.kind} {i.fault}",
            "cat": "fault",
            "id": f"{arm.id}/{i.fault}/{i.occurrence}",
        }
        args = {"target": i.target, "outcome": i.outcome, "evidence": i.evidence}
        yield {"ph": "b", "ts": round(i.injected_s * 1e6, 3), **common, "args": args}
        yield {"ph": "e", "ts": round(max(end, *over, i.injected_s) * 1e6, 3), **common}


def _news(log: Log | None) -> Iterator[dict[str, Any]]:
    """Nodes that joined or were lost, as marks over the whole arm."""
    for event in log.of(Kind.NODE_JOINED, Kind.NODE_LOST) if log else ():
        what = "joined" if event.kind is Kind.NODE_JOINED else "lost"
        yield {
            "ph": "i",
            "s": "p",
            "cat": "node",
            "ts": round((event.time_ns - start_ns(log)) / 1e3, 3) if log else 0.0,
            "args": dict(event.data),
            "name": f"node {event.data['node']} {what}",
        }


def _json(value: Any) -> Any:
    """A value with infinity and NaN as text: JSON has neither, and viewers would fail to parse
    them.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _json(v) for k, v in value.items()}
    return [_json(v) for v in value] if isinstance(value, list | tuple) else value
