"""What is told of each incident afterwards: when it was noticed, who was blamed, what it cost, and
which strategy of the same exam got off more cheaply. Computed from the event logs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log
from trainchaos.harness.attribute.key import KeyIncident

SIGNALS = (
    Kind.PROCESS_EXITED,
    Kind.ERROR_RAISED,
    Kind.NONFINITE_CAUGHT,
    Kind.HEALTH_REPORTED,
    Kind.CHECKPOINT_FAILED,
    Kind.CHECKPOINT_REFUSED,
    Kind.NODE_LOST,
    Kind.COORDINATOR_ADOPTED,
    Kind.FAILURE_DETECTED,
)
"""What first shows that something is wrong."""


class Moment(BaseModel):
    """One line of a timeline. ``at_s``: since the run began."""

    model_config = ConfigDict(frozen=True)

    at_s: float
    what: str
    who: str | None = None


class Cheaper(BaseModel):
    """A strategy whose median cost of the same kind of fault was lower, of ``n`` incidents."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    cost_s: float
    n: int


class Aftermath(BaseModel):
    """One incident. ``cost_s``: from the hit until the job had committed more steps than before;
    None: it never had. ``steps_redone``: committed before, and done again. ``blamed``: the rank
    that the supervisor named; ``blamed_right``: None where nobody was named.
    """

    model_config = ConfigDict(frozen=True)

    timeline: list[Moment]
    first_signal: Moment | None
    blamed: int | None
    blamed_right: bool | None
    cost_s: float | None
    steps_redone: int
    cheaper: Cheaper | None = None


def aftermath_of(log: Log, truth: KeyIncident) -> Aftermath:
    """What followed an incident, until the job trained on."""
    started = log.first(Kind.RUN_STARTED)
    start_ns = started.time_ns if started else 0
    hit_ns = start_ns + int(1e9 * truth.at_s)
    commits = list(log.of(Kind.STEP_COMMITTED))
    before = max((e.step or 0 for e in commits if e.time_ns <= hit_ns), default=0)
    over = next((e for e in commits if e.time_ns > hit_ns and (e.step or 0) > before), None)
    failure = _first(log, hit_ns, Kind.FAILURE_DETECTED)
    declared = failure.time_ns if failure else hit_ns
    answered = [
        event
        for kind in (Kind.DECISION, Kind.GENERATION_STARTED, Kind.GENERATION_READY)
        if failure and (event := _first(log, declared, kind))
    ]
    signal = next((e for e in log.of(*SIGNALS) if e.time_ns >= hit_ns and _tells(e)), None)
    shown = [one for one in (signal, failure, *answered, over) if one]
    resumed = next((e for e in answered if e.kind is Kind.GENERATION_READY), None)
    last = max((e.step or 0 for e in commits if e.time_ns <= declared), default=0)
    named = failure.data["rank"] if failure else None
    unique = {(event.actor, event.seq): event for event in shown}
    return Aftermath(
        timeline=[
            Moment(at_s=truth.at_s, what=truth.kind),
            *(_moment(event, start_ns) for event in sorted(unique.values(), key=_time)),
        ],
        first_signal=_moment(signal, start_ns) if signal else None,
        blamed=named,
        blamed_right=None if named is None else truth.anybody or named in truth.hit,
        cost_s=round((over.time_ns - hit_ns) / 1e9, 6) if over else None,
        steps_redone=max(0, last - (resumed.step or 0)) if resumed else 0,
    )


def with_cheaper(
    rows: Sequence[tuple[str, str, Aftermath]],
) -> list[Aftermath]:
    """The same, each with the strategy of lowest median cost where another was cheaper.
    ``rows``: kind, strategy and aftermath; an incident that was never over costs more than all
    others.
    """
    costs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kind, strategy, one in rows:
        costs[kind, strategy].append(float("inf") if one.cost_s is None else one.cost_s)
    typical = {key: median(values) for key, values in costs.items()}
    made = []
    for kind, strategy, one in rows:
        best = min((cost, other) for (of, other), cost in typical.items() if of == kind)
        if best[1] != strategy and best[0] < typical[kind, strategy]:
            found = Cheaper(strategy=best[1], cost_s=best[0], n=len(costs[kind, best[1]]))
            one = one.model_copy(update={"cheaper": found})
        made.append(one)
    return made


def _first(log: Log, since_ns: int, kind: Kind) -> Event | None:
    return next((event for event in log.of(kind) if event.time_ns >= since_ns), None)


def _tells(event: Event) -> bool:
    return event.kind is not Kind.PROCESS_EXITED or not event.data["expected"]


def _time(event: Event) -> int:
    return event.time_ns


def _moment(event: Event, start_ns: int) -> Moment:
    words = event.data.get("detail") or event.data.get("reason") or ""
    what = event.kind.value.replace("_", " ") + (f": {words}" if words else "")
    if event.step is not None:
        what += f" (step {event.step})"
    who = event.data.get("process") if "process" in event.data else event.actor
    at_s = round((event.time_ns - start_ns) / 1e9, 6)
    return Moment(at_s=at_s, what=what[:200], who=who)
