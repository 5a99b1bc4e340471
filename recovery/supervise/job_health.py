"""What monitors find at the places of a job: recorded, and told to its controller where it
announces a failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.health.care.place_care import PlaceCare
from trainchaos.recovery.health.readings.signs import MODELS, Sign, event_of
from trainchaos.recovery.health.warnings import Places, PlaceWarnings, Supervise
from trainchaos.recovery.process.host import RecordEvent

Source = Callable[[], Iterable[Sign]]
"""What was found since the last call."""


class JobHealth:
    """``places``: of the job; ``care``: hears of all that is found at one; ``process_of``: the
    living process that holds a rank; ``sources``: the monitors; ``named``: what ``places`` calls a
    device of a node.
    """

    def __init__(
        self,
        places: Places,
        care: PlaceCare,
        record: RecordEvent,
        process_of: Callable[[int], str | None],
        sources: Sequence[Source],
        named: Callable[[int, str], str] = lambda node, device: device,
    ) -> None:
        self._care, self._record, self._process_of = care, record, process_of
        self._sources, self._named = sources, named
        self._warnings = PlaceWarnings(places, process_of)
        care.when_fit(lambda node, device: self._warnings.lift(named(node, device)))

    def look(self, supervise: Supervise) -> None:
        """Record what was found since the last look, and warn the controller of what will fail."""
        for source in self._sources:
            for sign in source():
                kind, data = event_of(sign)
                self._record(kind, **data)
                self.heard(sign)
        self._care.look()
        self._warnings.tell(supervise)

    def heard(self, sign: Sign) -> None:
        """Something was found, and is recorded already."""
        holder = None if sign.rank is None else self._process_of(sign.rank)
        self._care.heard(sign, holder)
        if sign.device is not None and sign.node is not None:
            sign = sign.model_copy(update={"device": self._named(sign.node, sign.device)})
        self._warnings.heard(sign)

    def failed(self, process: str, cause: str, detail: str) -> None:
        """A failure was declared that may be one of its place."""
        self._care.failed(process, cause, detail)

    def recall(self, events: Sequence[Event]) -> None:
        """Hear again what a lost supervisor had recorded of places: it may not have acted on it. A
        report about a rank is left out, as another process may hold the rank by now, and one about
        a device that was found fit since.
        """
        self._care.recall(events)
        fit: set[tuple[Any, Any]] = set()  # found so later
        told: list[Event] = []
        for event in reversed(events):
            spot = event.data.get("node") or 0, event.data.get("device")
            if event.kind is Kind.PLACE_CHECKED and event.data["fit"]:
                fit.add(spot)
            elif event.kind in MODELS and event.data.get("rank") is None and spot not in fit:
                told.append(event)
        for event in reversed(told):
            with contextlib.suppress(ValidationError):  # written by another version
                self.heard(MODELS[event.kind].model_validate(event.data))
