"""Numbers in a log that are too large to compute with: following them could take any amount of time
and memory.
"""

from __future__ import annotations

from typing import Any

from trainchaos.chaos.events.log import ActorLog, Kind, Log
from trainchaos.chaos.scenario.model import Scenario

FACTOR = 100
"""Allowed multiple of what the scenario says; ``identity`` reports smaller deviations."""
LEAST = 1000
MOST_GENERATIONS = 1_000_000
MOST_SAMPLES = 2**48


def absurdity(log: Log, scenario: Scenario) -> str:
    """Why the size of the job in a log makes no sense; "" if it does."""
    started = log.first(Kind.RUN_STARTED)
    work = scenario.workload
    said: dict[str, Any] = dict(started.data) if started is not None else {}
    for name in ("ranks", "spares", "steps", "global_batch"):
        most = FACTOR * max(LEAST, int(getattr(work, name, 0) or 0))
        if not _within(said.get(name), most):
            return f"run_started names {said.get(name)!r:.40} {name}"
    order = said.get("order")
    if order is not None and not (
        isinstance(order, dict) and _within(order.get("samples"), MOST_SAMPLES)
    ):
        return f"run_started names the order {order!r:.40}"
    steps = FACTOR * max(LEAST, work.steps)
    for actor in log.actors.values():
        if _all_within(actor, steps):
            continue
        for event in actor.events:
            if event.step is not None and not _within(event.step, steps):
                return f"{event.kind} of {actor.actor} is of step {event.step!r:.40}"
            if not _within(event.generation, MOST_GENERATIONS):
                return f"{event.kind} of {actor.actor} is of generation {event.generation!r:.40}"
    return ""


def _all_within(actor: ActorLog, steps: int) -> bool:
    """Whether the steps and generations of all events are, found without a look at each alone."""
    made = [step for step in actor.steps if step is not None]
    return all(
        not found or (min(found) >= 0 and max(found) <= most)
        for found, most in ((made, steps), (actor.generations, MOST_GENERATIONS))
    )


def _within(value: Any, most: int) -> bool:
    return value is None or (type(value) is int and 0 <= value <= most)
