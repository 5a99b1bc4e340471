"""What spares brought that took places, by the log of a real job."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind, Log


@dataclass(frozen=True, kw_only=True)
class Promoted:
    """A process that is new in a generation. ``origin``, ``size``: of its state, in bytes.

    ``ahead``: a rank that was lost had applied a step that no survivor had: they had not read its
    sum to the end. A spare that it had fed may be a step ahead as well, and copies the state.
    ``parked``: the survivors, and what each held.
    """

    process: str
    rank: int
    origin: str
    size: int
    ahead: bool
    parked: Event

    @property
    def newest(self) -> int:
        """The last step that a survivor has applied."""
        return _newest(self.parked)


def promotions(log: Log) -> list[Promoted]:
    """One for each process that took the place of another, in time order."""
    found = []
    parked = {event.generation: event for event in log.of(Kind.SURVIVORS_PARKED)}
    ready = {(event.actor, event.generation): event for event in log.of(Kind.STATE_READY)}
    for old, new in itertools.pairwise(log.of(Kind.GENERATION_STARTED)):
        before, after = old.data["members"], new.data["members"]
        held = parked[old.generation]
        lost = max((_last_step(log, name) for name in before if name not in after), default=0)
        for name in after:
            if name not in before:
                event = ready[name, new.generation]
                found.append(
                    Promoted(
                        process=name,
                        rank=event.data["rank"],
                        origin=event.data["origin"],
                        size=event.data["bytes"],
                        ahead=lost > _newest(held),
                        parked=held,
                    )
                )
    return found


def _newest(parked: Event) -> int:
    return int(max(held["step"] for held in parked.data["processes"].values()))


def _last_step(log: Log, process: str) -> int:
    steps = [event.step for event in log.of(Kind.STEP_COMMITTED) if event.actor == process]
    return (steps[-1] if steps else 0) or 0
