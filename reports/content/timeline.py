"""What happened in a faulted arm, in order: the fault, its detection, what was decided, and when
training went on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.chaos.units import plural, scalar
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.reports.content.facts import struck
from trainchaos.reports.content.series import commits_of, log_of, start_ns

MAX_ARMS = 24
MAX_MOMENTS = 60
MAX_TEXT = 200
FAULT, RECOVERY, CHECKPOINT, OTHER = "fault", "recovery", "checkpoint", "other"
Told = tuple[str, str, str, str]
"""Lane, what, who, detail."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One event for a person: seconds since the start of the arm, its lane, what it was, who."""

    time_s: float
    lane: str
    what: str
    who: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The moments of an arm, by time; ``left_out``: how many more it had. ``ended_well``: it
    completed and no invariant failed.
    """

    arm: ArmResult
    moments: tuple[Moment, ...]
    left_out: int
    incidents: tuple[Incident, ...]
    ended_well: bool


def ended_well(arm: ArmResult) -> bool:
    """Whether an arm completed and all that was checked of it holds."""
    return arm.outcome == "completed" and all(f.verdict == "pass" for f in arm.invariants.values())


def timelines(run: RunDirectory, results: Results) -> tuple[list[Timeline], int]:
    """Timelines of the faulted arms, in the order of the results, and how many arms have none here.
    Of more than ``MAX_ARMS``, those that did not end well come first. An arm whose log cannot be
    read has none.
    """
    faulted = [arm for arm in results.arms if arm.arm == "faulted"]
    chosen = {arm.id for arm in sorted(faulted, key=ended_well)[:MAX_ARMS]}
    found = [_timeline(run, results, arm) for arm in faulted if arm.id in chosen]
    shown = [one for one in found if one is not None]
    return shown, len(faulted) - len(shown)


def _timeline(run: RunDirectory, results: Results, arm: ArmResult) -> Timeline | None:
    if (log := log_of(run, arm)) is None:
        return None
    moments = moments_of(log)
    kept = bounded(moments)
    return Timeline(
        arm=arm,
        moments=tuple(kept),
        left_out=len(moments) - len(kept),
        incidents=tuple(struck(results, arm)),
        ended_well=ended_well(arm),
    )


def bounded(moments: list[Moment]) -> list[Moment]:
    """At most ``MAX_MOMENTS``: checkpoints are left out first, then the middle."""
    if len(moments) <= MAX_MOMENTS:
        return moments
    told = [m for m in moments if m.lane != CHECKPOINT]
    if len(told) <= MAX_MOMENTS:
        return told
    return [*told[: MAX_MOMENTS - 10], *told[-10:]]


def moments_of(log: Log) -> list[Moment]:
    """Every moment of a log, by time. Events whose values make no sense are left out."""
    zero = start_ns(log)
    found: list[tuple[int, Moment]] = []
    for event, told in (*_told(log.events), *_again(log), *_restored(log)):
        lane, what, who, detail = told
        moment = Moment(
            time_s=(event.time_ns - zero) / 1e9,
            lane=lane,
            what=what,
            who=_short(who),
            detail=_short(detail),
        )
        found.append((event.time_ns, moment))
    return [moment for _, moment in sorted(found, key=lambda pair: pair[0])]


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_TEXT else f"{flat[:MAX_TEXT]}…"


def _told(events: Iterable[Event]) -> Iterator[tuple[Event, Told]]:
    for event in events:
        with suppress(KeyError, TypeError, AttributeError, ValueError):
            said = _moment(event, event.data)
            if said is not None:
                yield event, said


def _moment(event: Event, data: Mapping[str, Any]) -> Told | None:
    """An event worth a line."""
    match event.kind:
        case Kind.FAULT_INJECTED:
            step = f"step {event.step}" if event.step else ""
            where = ", ".join(filter(None, (step, str(data.get("phase") or ""))))
            return FAULT, f"fault injected: {data['kind']}", target_of(data["target"]), where
        case Kind.FAULT_FAILED:
            return FAULT, "fault did not land", str(data["fault"]), str(data["reason"])
        case Kind.FAULT_HEALED:
            return OTHER, "fault healed", str(data["fault"]), str(data.get("how", ""))
        case Kind.FAILURE_DETECTED:
            blamed = "no rank blamed" if data["rank"] is None else f"rank {data['rank']}"
            return RECOVERY, "failure detected", blamed, f"{data['cause']}: {data['detail']}"
        case Kind.DECISION:
            actions = "; ".join(map(str, data.get("actions") or ()))
            return RECOVERY, "decision", "supervisor", f"{data['reason']} ({actions})"
        case Kind.GENERATION_READY:
            origin = f" from {data['checkpoint']}" if data["checkpoint"] else ""
            lane = RECOVERY if event.generation > 1 else OTHER
            what, ranks = f"generation {event.generation} formed", len(data["members"])
            return lane, what, plural(ranks, "rank"), f"after step {data['resume_step']}{origin}"
        # of a command, which forms its own
        case Kind.GENERATION_STARTED if event.generation > 1 and data["state"] == "own":
            what, ranks = f"generation {event.generation} began", len(data["members"])
            return RECOVERY, what, plural(ranks, "rank"), str(data["cause"])
        case Kind.CHECKPOINT_COMMITTED:
            return CHECKPOINT, "checkpoint committed", event.actor, str(data["checkpoint"])
        case Kind.CHECKPOINT_FAILED | Kind.CHECKPOINT_REFUSED:
            what = event.kind.value.replace("_", " ")
            why = str(data.get("why") or data.get("reason") or data.get("error") or "")
            return CHECKPOINT, what, event.actor, f"{data.get('checkpoint', '')} {why}"
        case Kind.NODE_LOST:
            return OTHER, "node lost", f"node {data['node']}", str(data["why"])
        case Kind.NODE_JOINED if event.generation > 0:
            return OTHER, "node joined", f"node {data['node']}", str(data["host"])
        case Kind.PROCESS_EXITED if not data["expected"]:
            return OTHER, "process ended", str(data["process"]), _end(data)
        case Kind.COMMAND_STARTED:
            return OTHER, "command started", "", f"attempt {data['attempt']}"
        case Kind.COMMAND_ENDED:
            return OTHER, "command ended", "", _end(data)
        case Kind.RUN_FINISHED:
            # further lines are what a command printed last, which the page shows by itself
            reason = str(data["reason"]).split("\n", 1)[0]
            return OTHER, f"arm ended: {data['outcome']}", "", reason
    return None


def _end(data: Mapping[str, Any]) -> str:
    signal = data["signal"]
    return f"exit code {data['exit_code']}" if signal is None else f"signal {signal}"


def target_of(target: Mapping[str, Any]) -> str:
    """``rank 1 (w1)``, of the target of a fault."""
    if "process" not in target:
        named = (f"{k} {scalar(v)}" for k, v in target.items() if k != "processes")
        return ", ".join(named) or "the job"
    rank, process = target.get("rank"), str(target["process"])
    if rank is None:
        return process if process.startswith("launcher") else f"spare {process}"
    return f"rank {rank} ({process})"


def _restored(log: Log) -> Iterator[tuple[Event, Told]]:
    """When the last rank of each later generation had its state, and where the states came from."""
    by_generation: dict[int, list[Event]] = {}
    for event in log.of(Kind.STATE_READY):
        if event.generation > 1:
            by_generation.setdefault(event.generation, []).append(event)
    for events in by_generation.values():
        origins = Counter(str(event.data.get("origin", "")) for event in events)
        counted = ", ".join(f"{count} {origin}" for origin, count in origins.items())
        last = max(events, key=lambda event: event.time_ns)
        yield last, (RECOVERY, "state restored", plural(len(events), "rank"), counted)


def _again(log: Log) -> Iterator[tuple[Event, Told]]:
    """The first step of each later generation, and the first that no generation before had."""
    highest, seen, waiting = 0, 1, False
    for event in sorted(commits_of(log), key=lambda one: one.time_ns):
        step = event.step or 0
        began, seen = event.generation > seen, max(seen, event.generation)
        new = step > highest
        if began or (waiting and new):
            waiting = not new
            what = "first step again" if began else "first new step"
            yield (
                event,
                (RECOVERY, what, event.actor, f"step {step}{'' if new else ', done before'}"),
            )
        highest = max(highest, step)
