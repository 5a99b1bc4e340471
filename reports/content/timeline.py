"""What happened in a faulted arm, in order: the fault, its detection, what was decided, and when
training went on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
    found = []
    for event, moment in (*_told(log.events), *_again(log), *_restored(log)):
        cut = replace(moment, who=_short(moment.who), detail=_short(moment.detail))
        found.append((event.time_ns, replace(cut, time_s=(event.time_ns - zero) / 1e9)))
    return [moment for _, moment in sorted(found, key=lambda pair: pair[0])]


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_TEXT else f"{flat[:MAX_TEXT]}…"


def _told(events: Iterable[Event]) -> Iterator[tuple[Event, Moment]]:
    for event in events:
        try:
            said = _moment(event, event.data)
        except (KeyError, TypeError, AttributeError, ValueError):
            continue
        if said is not None:
            lane, what, who, detail = said
            yield event, Moment(time_s=0.0, lane=lane, what=what, who=who, detail=detail)


def _moment(event: Event, data: Mapping[str, Any]) -> tuple[str, str, str, str] | None:
    """Lane, what, who and detail of an event worth a line."""
    match event.kind:
        case Kind.FAULT_INJECTED:
            step = f"step {event.step}" if event.step else ""
            phase = str(data.get("phase") or "")
            where = ", ".join(part for part in (step, phase) if part)
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
        case Kind.GENERATION_READY | Kind.GENERATION_STARTED:
            return _generation(event, data)
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


def _generation(event: Event, data: Mapping[str, Any]) -> tuple[str, str, str, str] | None:
    ranks = plural(len(data["members"]), "rank")
    if event.kind is Kind.GENERATION_READY:
        origin = f" from {data['checkpoint']}" if data["checkpoint"] else ""
        detail = f"after step {data['resume_step']}{origin}"
        lane = RECOVERY if event.generation > 1 else OTHER
        return lane, f"generation {event.generation} formed", ranks, detail
    if event.generation > 1 and data["state"] == "own":  # of a command, which forms its own
        return RECOVERY, f"generation {event.generation} began", ranks, str(data["cause"])
    return None


def _restored(log: Log) -> Iterator[tuple[Event, Moment]]:
    """When the last rank of each later generation had its state, and where the states came from."""
    by_generation: dict[int, list[Event]] = {}
    for event in log.of(Kind.STATE_READY):
        if event.generation > 1:
            by_generation.setdefault(event.generation, []).append(event)
    for events in by_generation.values():
        origins = [str(event.data.get("origin", "")) for event in events]
        counted = ", ".join(f"{origins.count(o)} {o}" for o in dict.fromkeys(origins))
        yield (
            max(events, key=lambda event: event.time_ns),
            Moment(
                time_s=0.0,
                lane=RECOVERY,
                what="state restored",
                who=plural(len(events), "rank"),
                detail=counted,
            ),
        )


def _again(log: Log) -> Iterator[tuple[Event, Moment]]:
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
                Moment(
                    time_s=0.0,
                    lane=RECOVERY,
                    what=what,
                    who=event.actor,
                    detail=f"step {step}{'' if new else ', done before'}",
                ),
            )
        highest = max(highest, step)
