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
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind, Log
from trainchaos.chaos.files import replacing
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.reports.content.facts import struck
from trainchaos.reports.content.series import healed_of, log_of, observed, start_ns

PHASES = ("data", "forward", "backward", "collective", "optimizer")
# Importers become slow beyond some hundred megabytes; a larger arm keeps only the lanes without
# steps.
MAX_STEP_EVENTS = 500_000
_LANES = ("recovery", "generations", "steps", "phases", "state", "busy")


@dataclass(frozen=True, kw_only=True)
class TraceSpan:
    """A span of time on one lane, in microseconds since the arm began."""

    name: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)


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
            left -= sum(
                len(spans) for (_, lane), spans in lanes.items() if lane in ("steps", "phases")
            )
            for record in _records(pid, arm, lanes, _faults(results, arm, log), _news(log)):
                out.write(separator + json.dumps(record, separators=(",", ":")))
                separator = ",\n"
        out.write("\n]}\n")
    return path


def _lanes(
    log: Log | None, arm: ArmResult, results: Results, left: int
) -> dict[Lane, list[TraceSpan]]:
    """All spans of an arm by (actor, lane); clipped so that none overlap within a lane."""
    lanes: dict[Lane, list[TraceSpan]] = defaultdict(list)
    for incident in struck(results, arm):
        lanes[ORCHESTRATOR, "recovery"] += list(_recovery(incident))
    if log is not None:
        zero = start_ns(log)
        lanes[ORCHESTRATOR, "generations"] = list(_generations(log, zero))
        for event in log.of(Kind.GROUP_FORMED, Kind.STATE_READY, Kind.CHECKPOINT_COMMITTED):
            lanes[event.actor, "state"].append(_state(event, zero))
        for actor, span in _busy(log, zero):
            lanes[actor, "busy"].append(span)
        lanes[ORCHESTRATOR, "steps"] = list(_observed(log, zero, left))
        commits = list(log.of(Kind.STEP_COMMITTED))
        if len(commits) * (len(PHASES) + 1) <= left:
            for event in commits:
                lanes[event.actor, "steps"].append(_step(event, zero))
                lanes[event.actor, "phases"] += list(_phases(event, zero))
    return {lane: clip(spans) for lane, spans in sorted(lanes.items(), key=_lane_order) if spans}


def _observed(log: Log, zero: int, left: int) -> Iterator[TraceSpan]:
    """The steps of a command, known only from its observer."""
    if not observed(log):
        return
    for run in history_of(log).runs[: max(0, left)]:
        args = {"generation": run.generation, "loss": run.loss}
        yield _span(f"step {run.step}", run.start_ns - zero, run.end_ns - zero, args)


def _lane_order(item: tuple[Lane, list[TraceSpan]]) -> tuple[bool, str, int]:
    (actor, lane), _ = item
    return actor != ORCHESTRATOR, actor, _LANES.index(lane)


def clip(spans: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Spans sorted by start, each cut to begin when the previous one ended; empty spans are
    removed.
    """
    kept: list[TraceSpan] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        start = max(span.start, kept[-1].end if kept else 0.0)
        if span.end > start:
            kept.append(TraceSpan(name=span.name, start=start, end=span.end, args=span.args))
    return kept


def _seconds(event: Event) -> dict[str, float]:
    return {
        k: float(v)
        for k, v in event.data["seconds"].items()
        if isinstance(v, int | float) and math.isfinite(v)
    }


def _span(name: str, start_ns: float, end_ns: float, args: Mapping[str, Any]) -> TraceSpan:
    return TraceSpan(name=name, start=start_ns / 1e3, end=end_ns / 1e3, args=_json(dict(args)))


def _ending(name: str, event: Event, zero: int, seconds: float, **args: Any) -> TraceSpan:
    """What took ``seconds`` until the event."""
    end = event.time_ns - zero
    return _span(name, end - seconds * 1e9, end, args)


def _step(event: Event, zero: int) -> TraceSpan:
    spent = sum(_seconds(event).values())
    told = {"loss": event.data["loss"], "rank": event.data["rank"]}
    return _ending(f"step {event.step}", event, zero, spent, generation=event.generation, **told)


def _phases(event: Event, zero: int) -> Iterator[TraceSpan]:
    """The phases of a step one after the other, the last one ending when the step was committed."""
    seconds = _seconds(event)
    names = [*(p for p in PHASES if p in seconds), *(p for p in seconds if p not in PHASES)]
    start = (event.time_ns - zero) / 1e3 - sum(seconds.values()) * 1e6
    for name in names:
        end = start + seconds[name] * 1e6
        yield TraceSpan(name=name, start=start, end=end, args={"step": event.step})
        start = end


def _state(event: Event, zero: int) -> TraceSpan:
    name = {
        Kind.GROUP_FORMED: "form group",
        Kind.STATE_READY: "get state",
        Kind.CHECKPOINT_COMMITTED: "save checkpoint",
    }[event.kind]
    args = {key: value for key, value in event.data.items() if key != "seconds"}
    seconds = float(event.data["seconds"])
    return _ending(name, event, zero, seconds, **{**args, "step": event.step})


def _busy(log: Log, zero: int) -> Iterator[tuple[str, TraceSpan]]:
    """(actor, span) of reported activities besides training; without a reported end, up to the end
    of the process or log.
    """
    begun: dict[str, list[Event]] = defaultdict(list)
    for event in log.of(Kind.BUSY, Kind.BUSY_ENDED, Kind.PROCESS_EXITED):
        if event.kind is Kind.PROCESS_EXITED:
            over = begun.pop(event.data["process"], [])
        elif event.kind is Kind.BUSY:
            begun[_who(event)].append(event)
            continue
        else:
            doing = begun[_who(event)]
            over = [
                next(
                    (one for one in reversed(doing) if one.data["what"] == event.data["what"]),
                    event,
                )
            ]
            begun[_who(event)] = [one for one in doing if one is not over[0]]
        yield from ((_who(one), _doing(one, event, zero)) for one in over)
    for left in begun.values():
        yield from ((_who(one), _doing(one, log.events[-1], zero)) for one in left)


def _who(event: Event) -> str:
    """The actor of an event; for a command, the rank named by the observer."""
    return event.actor if event.actor != ORCHESTRATOR else f"rank {event.data['rank']}"


def _doing(begun: Event, end: Event, zero: int) -> TraceSpan:
    what = str(begun.data["what"])
    return _span(what, begun.time_ns - zero, end.time_ns - zero, begun.data)


def _generations(log: Log, zero: int) -> Iterator[TraceSpan]:
    """From each generation's start to the next one's, the last to the end of the log."""
    started = list(log.of(Kind.GENERATION_STARTED))
    ends = [*(e.time_ns for e in started[1:]), log.events[-1].time_ns]
    for event, end in zip(started, ends, strict=False):  # no generation began: one end too many
        args = {key: event.data[key] for key in ("members", "state", "source", "cause")}
        name = f"generation {event.generation}"
        yield _span(name, event.time_ns - zero, end - zero, args)


def _recovery(incident: Incident) -> Iterator[TraceSpan]:
    for phase in incident.phases:
        start = (incident.injected_s + phase.start) * 1e6
        args = {"fault": incident.fault, "decision": incident.decision}
        yield TraceSpan(name=phase.name, start=start, end=start + phase.seconds * 1e6, args=args)


def _faults(results: Results, arm: ArmResult, log: Log | None) -> list[tuple[Incident, float]]:
    """Each incident with the second it ended: the later of recovery and heal, else the end of the
    arm.
    """
    healed = healed_of(log) if log else {}
    found = []
    for i in struck(results, arm):
        end = i.injected_s + (i.recovery_time or 0.0) if i.recovery_time != math.inf else arm.wall_s
        over = [healed.get((i.fault, number), 0.0) for number in i.occurrences]
        found.append((i, max(end, *over, i.injected_s)))
    return found


def _records(
    pid: int,
    arm: ArmResult,
    lanes: dict[Lane, list[TraceSpan]],
    faults: list[tuple[Incident, float]],
    news: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    home = {name: f" (node {one.node}, {one.host})" for one in arm.nodes for name in one.processes}
    yield _named(pid, 0, "process_name", name=arm.id)
    if bounds := {f"node {one.node}": one.clock_bound_s for one in arm.nodes if one.clock_bound_s}:
        yield _named(
            pid, 0, "process_labels", labels=f"clocks right to ±{max(bounds.values()) * 1e3:.3g} ms"
        )
    yield _named(pid, 0, "process_sort_index", sort_index=pid)
    for tid, ((actor, lane), spans) in enumerate(lanes.items(), start=1):
        yield _named(pid, tid, "thread_name", name=f"{actor}{home.get(actor, '')} {lane}")
        yield _named(pid, tid, "thread_sort_index", sort_index=tid)
        for span in spans:
            start, end = round(span.start, 3), round(span.end, 3)
            yield {
                "ph": "X",
                "name": span.name,
                "cat": lane,
                "pid": pid,
                "tid": tid,
                "ts": start,
                "dur": round(end - start, 3),
                "args": span.args,
            }
    yield from ({"pid": pid, "tid": 0, **record} for record in news)
    for incident, end in faults:
        common = {
            "name": f"{incident.kind} {incident.fault}",
            "cat": "fault",
            "pid": pid,
            "tid": 0,
            "id": f"{arm.id}/{incident.fault}/{incident.occurrence}",
        }
        args = {
            "target": incident.target,
            "outcome": incident.outcome,
            "evidence": incident.evidence,
        }
        yield {"ph": "b", "ts": round(incident.injected_s * 1e6, 3), **common, "args": _json(args)}
        yield {"ph": "e", "ts": round(end * 1e6, 3), **common}


def _news(log: Log | None) -> list[dict[str, Any]]:
    """Nodes that joined or were lost, as marks over the whole arm."""
    zero = start_ns(log) if log else 0
    return [
        {
            "ph": "i",
            "s": "p",
            "cat": "node",
            "ts": round((event.time_ns - zero) / 1e3, 3),
            "args": _json(dict(event.data)),
            "name": (
                f"node {event.data['node']}"
                f" {'joined' if event.kind is Kind.NODE_JOINED else 'lost'}"
            ),
        }
        for event in (log.of(Kind.NODE_JOINED, Kind.NODE_LOST) if log else ())
    ]


def _named(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _json(value: Any) -> Any:
    """A value with infinity and NaN as text: JSON has neither, and viewers would fail to parse
    them.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _json(v) for k, v in value.items()}
    return [_json(v) for v in value] if isinstance(value, list | tuple) else value
