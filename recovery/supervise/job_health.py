"""What health monitors find at the places of one job: it is recorded, and heard by who cares for
the places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from trainchaos.recovery.health.reputation import PlaceCare, Warned
from trainchaos.recovery.health.signs import Sign, event_of
from trainchaos.recovery.process.host import RecordEvent

Source = Callable[[], Iterable[Sign]]
"""What was found since the last call."""


class JobHealth:
    """``care``: hears of all that is found at a place; ``process_of``: the living process that
    holds a rank; ``sources``: the monitors.
    """

    def __init__(
        self,
        care: PlaceCare,
        record: RecordEvent,
        process_of: Callable[[int], str | None],
        sources: Sequence[Source],
    ) -> None:
        self._care, self._record, self._process_of = care, record, process_of
        self._sources = sources

    def look(self, supervise: Callable[[Callable[[Warned], None]], object]) -> None:
        """Record what was found since the last look, and warn the controller of what will fail."""
        for source in self._sources:
            for sign in source():
                kind, data = event_of(sign)
                self._record(kind, **data)
                holder = None if sign.rank is None else self._process_of(sign.rank)
                self._care.heard(sign, holder)
        self._care.look(supervise)

    def failed(self, process: str, cause: str, detail: str) -> None:
        """A failure was declared that may be one of its place."""
        self._care.failed(process, cause, detail)
