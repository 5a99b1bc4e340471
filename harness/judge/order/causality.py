"""What must have come before what, given how processes communicate, and clocks that say otherwise.

Every line carries the time of its act by its writer's clock, however late it reached the file. A
sender logs an event before it sends the message about it, so the line of a process that acts on the
message is later in truth. On one machine all share a clock, and the times must be in that order
too. Between machines they may be out of order by at most the bounds of the two measured offsets.

- A fault is injected before it lands, is healed, or shows any effect.
- A process starts after the supervisor's previous line, and writes nothing after it was seen to
  end. Processes of a lost node may go on unseen.
- A failure's cause precedes the failure, which precedes the generation that answers it.
- A generation is started before any of its members begins to form the group, which takes as long as
  the member says; members hold their state before the generation is ready.
- No rank commits a step before every member has taken its batch of it: the commit waits for the sum
  of all gradients.
- A process that is declared silent for some time showed its last sign of life that long before, and
  was stopped that long before if it is said to be stopped. A process that a fault is seen to have
  killed ended after the fault, and its end was declared after that. When a fault may have been
  injected: ``harness.judge.order.anchors``.
- What the supervisor was informed of (a rank parked, a step's digests agree, the job is done) was
  so when it logged it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from operator import attrgetter

from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Event, Kind, Log
from trainchaos.harness.judge.order.anchors import ROUNDED_NS, Pair, injection_pairs
from trainchaos.harness.judge.order.slip import SAME_CLOCK_S, Slip
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.recovery.checkpoint.memory import ROLE as KEEPER

_time = attrgetter("time_ns")
_ANSWERS = ("failure", "refill")


def slips(history: History) -> list[Slip]:
    """All pairs of events that are out of order, the widest first."""
    log = history.log
    pairs = [
        _fault_pairs(log),
        _life_pairs(log),
        injection_pairs(history),
        _blame_pairs(log),
        _silence_pairs(log),
    ]
    if not history.info.observed:
        pairs += [
            _generation_pairs(history),
            _failure_pairs(history),
            _step_pairs(history),
            _informed_pairs(history),
        ]
    found = (_slip(log, *pair) for pair in itertools.chain(*pairs))
    return sorted((slip for slip in found if slip is not None), key=lambda slip: -slip.by_s)


def _slip(log: Log, earlier: Event, later: Event, text: str, between_ns: int) -> Slip | None:
    by_ns = earlier.time_ns + between_ns - later.time_ns
    if by_ns <= 0:
        return None
    blur_s = (log.clocks.bound_ns(earlier) + log.clocks.bound_ns(later)) / NS + SAME_CLOCK_S
    return Slip(text=text, by_s=by_ns / NS, blur_s=0.0 if earlier.actor == later.actor else blur_s)


def _fault_pairs(log: Log) -> Iterator[Pair]:
    injected: dict[tuple[str, int], Event] = {}
    planned = {event.data["fault"]: event for event in log.of(Kind.FAULT_PLANNED)}
    for event in log.of(Kind.FAULT_INJECTED):
        injected.setdefault((event.data["fault"], event.data["occurrence"]), event)
        if (plan := planned.get(event.data["fault"])) is not None:
            yield plan, event, f"{event.data['fault']} was injected before it was announced", 0
    for event in log.of(Kind.FAULT_LANDED, Kind.FAULT_HEALED, Kind.FAULT_EFFECT):
        first = injected.get((event.data["fault"], event.data["occurrence"]))
        what = event.kind.value.removeprefix("fault_")
        if first is not None:
            yield first, event, f"{event.data['fault']} {what} before it was injected", 0
            if isinstance(begun_ns := event.data.get("begun_ns"), int):
                lag_ns, name = event.time_ns - begun_ns, event.data["fault"]
                yield first, event, f"the undoing of {name} began before it was injected", lag_ns
                yield event, event, f"{name} healed before its undoing began", -lag_ns


def _life_pairs(log: Log) -> Iterator[Pair]:
    """Everything that a process writes lies within its life."""
    own = log.actors[ORCHESTRATOR].events if ORCHESTRATOR in log.actors else ()
    lost = {event.data["node"] for event in log.of(Kind.NODE_LOST)}
    home = {e.data["process"]: e.data.get("node") for e in own if e.kind is Kind.PROCESS_SPAWNED}
    for before, event in itertools.pairwise(own):
        name = str(event.data.get("process"))
        lines = log.actors[name].events if name in log.actors and name != ORCHESTRATOR else ()
        if not lines or event.data.get("role") == KEEPER:
            continue
        if event.kind is Kind.PROCESS_SPAWNED:
            yield before, lines[0], f"{name} began before it was started", 0
        elif event.kind is Kind.PROCESS_READY:
            yield lines[0], event, f"{name} was ready before it began", 0
        elif event.kind is Kind.PROCESS_EXITED and home.get(name) not in lost:
            latest = _latest(log.actors[name])
            yield latest, event, f"{name} wrote {latest.kind.value} after it had ended", 0


def _latest(actor: ActorLog) -> Event:
    """The event with the latest time, the first if there are several."""
    return actor.events[actor.times.index(max(actor.times))]


def _generation_pairs(history: History) -> Iterator[Pair]:
    log = history.log
    started = {event.generation: event for event in log.of(Kind.GENERATION_STARTED)}
    ready = {event.generation: event for event in log.of(Kind.GENERATION_READY)}
    for event in log.of(Kind.GROUP_FORMED, Kind.STATE_READY):
        begin, end = started.get(event.generation), ready.get(event.generation)
        if begin is None or event.actor not in begin.data["members"]:
            continue
        what = f"{event.actor} of generation {event.generation}"
        if event.kind is Kind.GROUP_FORMED:
            took_ns = int(max(0.0, float(event.data["seconds"])) * NS)
            yield (
                begin,
                event,
                f"{what} had begun to form its group before the generation was started",
                took_ns,
            )
        elif end is not None:
            yield begin, event, f"{what} held its state before the generation was started", 0
            yield event, end, f"{what} held its state after the generation was ready", 0
    failures = list(log.of(Kind.FAILURE_DETECTED))
    for number, event in started.items():
        causes = [failure for failure in failures if failure.generation < number]
        if event.data["cause"] in _ANSWERS and causes:
            first = min(causes, key=lambda failure: failure.time_ns)
            yield (
                first,
                event,
                f"generation {number} answers a failure that was declared after it began",
                0,
            )


def _failure_pairs(history: History) -> Iterator[Pair]:
    """A process that was declared gone writes nothing more; values are refused before they are
    declared.
    """
    log = history.log
    away = _on_lost_nodes(log)
    for failure in log.of(Kind.FAILURE_DETECTED):
        name, cause = failure.data["process"], failure.data["cause"]
        if cause == "exit" and name in log.actors and name not in away:
            lines = log.actors[name].events
            if lines:
                latest = _latest(log.actors[name])
                yield (
                    latest,
                    failure,
                    f"{name} wrote {latest.kind.value} after its end had been declared",
                    0,
                )
        if cause == "nonfinite":
            seen = [e for e in log.of(Kind.NONFINITE_CAUGHT) if e.generation == failure.generation]
            if seen:
                first = min(seen, key=lambda event: event.time_ns)
                yield (
                    first,
                    failure,
                    "non-finite values were declared before any rank had refused them",
                    0,
                )


def _blame_pairs(log: Log) -> Iterator[Pair]:
    """A process killed by a fault ends after it, and its end is declared after that."""
    away = _on_lost_nodes(log)
    exits: dict[str, Event] = {}
    for event in log.of(Kind.PROCESS_EXITED):
        if event.data["process"] not in away:
            exits.setdefault(event.data["process"], event)
    ended = {
        e.data["process"]: e for e in log.of(Kind.FAILURE_DETECTED) if e.data["cause"] == "exit"
    }
    for name, failure in ended.items():
        gone = exits.get(name)
        if gone is not None and str(failure.data["detail"]).startswith(_exit_text(gone)):
            yield gone, failure, f"the end of {name} was declared before it had ended", 0
    for name, hit in _killed(log, exits).items():
        yield hit, exits[name], f"{name} had ended before it was hit by {hit.data['fault']}", 0
        if name in ended:
            yield (
                hit,
                ended[name],
                f"the end of {name} was declared before {hit.data['fault']} was injected",
                0,
            )


def _on_lost_nodes(log: Log) -> set[str]:
    """Processes on lost nodes, which may have gone on unseen whatever was declared."""
    lost = {event.data["node"] for event in log.of(Kind.NODE_LOST)}
    return {e.data["process"] for e in log.of(Kind.PROCESS_SPAWNED) if e.data.get("node") in lost}


def _exit_text(gone: Event) -> str:
    """The exit as a failure's detail states it."""
    signum = gone.data["signal"]
    return f"signal {signum}" if signum is not None else f"exit code {gone.data['exit_code']}"


def _killed(log: Log, exits: Mapping[str, Event]) -> Mapping[str, Event]:
    """Process -> the first injection on it, for processes that ended by the signal that a fault is
    seen to have sent.
    """
    first: dict[str, Event] = {}
    by: dict[tuple[str, int], str] = {}
    for event in log.of(Kind.FAULT_INJECTED):
        name = (event.data["target"] or {}).get("process")
        if isinstance(name, str):
            first.setdefault(name, event)
            by[event.data["fault"], event.data["occurrence"]] = name
    found = {}
    for event in log.of(Kind.FAULT_LANDED):
        name = by.get((event.data["fault"], event.data["occurrence"]))
        evidence = event.data["evidence"]
        signum = evidence.get("signal") if isinstance(evidence, dict) else None
        if (
            name is not None
            and name in exits
            and signum is not None
            and exits[name].data["signal"] == signum
        ):
            found[name] = first[name]
    return found


def _silence_pairs(log: Log) -> Iterator[Pair]:
    """A process that is declared silent showed its last sign of life that long before, and a
    stopped one was hit that long before.
    """
    stopped: dict[str, Event] = {}
    for event in log.of(Kind.FAULT_INJECTED):
        target = event.data["target"] or {}
        several = target.get("processes")
        for name in (target.get("process"), *(several if isinstance(several, list) else ())):
            if isinstance(name, str):
                stopped.setdefault(name, event)
    for failure in log.of(Kind.FAILURE_DETECTED):
        silent_s = failure.data.get("silent_s")
        if silent_s is None:
            continue
        name, silent_ns = failure.data["process"], round(silent_s * NS) - ROUNDED_NS
        text = f"{name or 'the job'} is declared silent for {silent_s:.3f} s"
        for last, ago_ns in _last_signs(log, failure):
            yield last, failure, f"{text} so soon after its last sign of life", silent_ns - ago_ns
        if failure.data.get("stopped") and name in stopped:
            hit = stopped[name]
            yield (
                hit,
                failure,
                f"{text} as one that was stopped, so soon after {hit.data['fault']}",
                silent_ns,
            )


def _last_signs(log: Log, failure: Event) -> Iterator[tuple[Event, int]]:
    """Events that are the last sign of life before a silence -> by how much they were logged late,
    ns.
    """
    if (number := failure.data.get("last_seq")) is not None:
        lines = (
            log.actors[failure.data["process"]].events
            if failure.data["process"] in log.actors
            else ()
        )
        yield from ((line, 0) for line in lines if line.seq == number)
        return
    newest: Event | None = None  # of a command: the report of the furthest step
    for report in log.of(Kind.STEP_REPORTED):
        mine = report.generation == failure.generation and report.seq < failure.seq
        if mine and (newest is None or (report.step or 0) > (newest.step or 0)):
            newest = report
    if newest is not None:
        yield newest, newest.time_ns - int(newest.data["reported_ns"])


def unmeasured(history: History) -> Iterator[str]:
    """Processes whose hangs have no recorded duration, as in older logs."""
    for failure in history.log.of(Kind.FAILURE_DETECTED):
        if failure.data["cause"] == "hang" and "silent_s" not in failure.data:
            yield str(failure.data["process"] or "the job")


def hasty(history: History) -> list[str]:
    """Silences that were declared before they had lasted as long as the limit."""
    return [
        f"{e.data['process'] or 'the job'} is declared silent after {e.data['silent_s']:.3f} s, the"
        f" limit is {e.data['limit_s']:.3f} s"
        for e in history.log.of(Kind.FAILURE_DETECTED)
        if "silent_s" in e.data and "limit_s" in e.data and e.data["silent_s"] < e.data["limit_s"]
    ]


def _step_pairs(history: History) -> Iterator[Pair]:
    for run in history.runs:
        if not run.batches:
            continue
        # of many steps, only such ones are put into words
        if max(run.taken.times) > min(run.done.times):
            taken, done = max(run.batches, key=_time), min(run.commits, key=_time)
            yield (
                taken,
                done,
                f"{done.actor} committed step {run.step} before {taken.actor} had taken its batch"
                " of it",
                0,
            )


def _informed_pairs(history: History) -> Iterator[Pair]:
    log = history.log
    parked = {(event.actor, event.generation): event for event in log.of(Kind.PARKED)}
    for event in log.of(Kind.SURVIVORS_PARKED):
        for name in event.data["processes"]:
            one = parked.get((name, event.generation))
            if one is not None:
                yield one, event, f"{name} parked after the supervisor had heard of it", 0
    agreed = {(event.generation, event.step): event for event in log.of(Kind.REPLICAS_AGREED)}
    finished, completed_ns = history.finished, None
    if finished is not None and finished.data["outcome"] == "completed":
        completed_ns = finished.time_ns
    for run in history.runs:
        last_ns = max(run.done.times)
        compared = agreed.get((run.generation, run.step))
        if compared is not None and last_ns > compared.time_ns:
            last = max(run.commits, key=_time)
            yield (
                last,
                compared,
                f"{last.actor} committed step {run.step} after its digest had been compared",
                0,
            )
        if completed_ns is not None and finished is not None and last_ns > completed_ns:
            last = max(run.commits, key=_time)
            yield (
                last,
                finished,
                f"{last.actor} committed step {run.step} after the job was done",
                0,
            )


def disorder(history: History) -> list[str]:
    """Ranks that commit the steps of one generation out of order."""
    problems = []
    for name, log in history.log.actors.items():
        last: dict[int, int] = {}
        for kind, number, step in zip(log.kinds, log.generations, log.steps, strict=True):
            if kind is not Kind.STEP_COMMITTED or step is None:
                continue
            if step < last.get(number, 0):  # another checker reports duplicates
                problems.append(
                    f"{name} committed step {step} after step {last[number]} of generation {number}"
                )
            last[number] = step
    return problems
