"""What is told of each incident of an exam afterwards: when it was noticed, who was blamed, what it
cost, and which strategy of the same exam got off more cheaply. Computed from the event logs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log
from trainchaos.harness.attribute.key import KeyIncident
from trainchaos.harness.explain.course import Moment, course_of, first_of


class Cheaper(BaseModel):
    """A strategy whose median cost of the same kind of fault was lower, of ``n`` incidents."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    cost_s: float
    n: int


class Aftermath(BaseModel):
    """One incident; ``cost_s`` and ``steps_redone`` as in ``Course``. ``blamed``: the rank that the
    supervisor named; ``blamed_right``: None where nobody was named.
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
    course = course_of(log, hit_ns, truth.kind, first_of(log, hit_ns, Kind.FAILURE_DETECTED))
    named = course.failure.data["rank"] if course.failure else None
    return Aftermath(
        timeline=list(course.moments),
        first_signal=course.signal,
        blamed=named,
        blamed_right=None if named is None else truth.anybody or named in truth.hit,
        cost_s=course.cost_s,
        steps_redone=course.steps_redone,
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
