"""Places that a job's processes leave alone until they are known to be fit: those that failed by a
cause that hardware may have, or were warned of.

A place is checked in the background from the moment that it becomes suspect. No recovery waits for
it: until the check is over, and for good if it finds the place unfit, processes start there only
where there is no other place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.health.care.place_check import Answer, Checker, Spot
from trainchaos.recovery.health.credible import announced
from trainchaos.recovery.health.readings.signs import Sign
from trainchaos.recovery.playbook.book import match_text
from trainchaos.recovery.playbook.entry import Owner
from trainchaos.recovery.policy.strategy import Cause


def why_suspect(cause: str, detail: str) -> str:
    """Why a failure makes its place suspect, for people; "" if it does not: its replica differed,
    though it computed the same, or its words are those of failing hardware. Raises PlaybookError.
    """
    if cause == Cause.DIVERGED.value:
        return "its state differed from the other replicas'"
    for match in match_text(detail.splitlines()):
        if match.entry.owner is Owner.HARDWARE:
            return match.entry.meaning.rstrip(".")
    return ""


class _Suspicion(NamedTuple):
    why: str
    since_s: float


class SuspectPlaces:
    """``checker``: closed with it; ``record``: writes an event; ``found``: called with each answer
    that says whether a place is fit. Always ``close``.
    """

    def __init__(
        self,
        checker: Checker,
        *,
        record: Callable[..., Any],
        found: Callable[[Answer], None],
        now_s: Callable[[], float],
    ) -> None:
        self._checker, self._record, self._found, self._now_s = checker, record, found, now_s
        self._waiting: dict[Spot, _Suspicion] = {}
        self._bad: set[Spot] = set()

    def avoids(self, spot: Spot) -> bool:
        """Whether a process should start elsewhere, if it can."""
        return spot in self._waiting or spot in self._bad

    def failed(self, spot: Spot | None, cause: str, detail: str) -> None:
        """A process failed there. Raises PlaybookError."""
        if spot is not None and (why := why_suspect(cause, detail)):
            self._suspect(spot, why)

    def heard(self, sign: Sign, spots: Sequence[Spot]) -> None:
        """Something was found at these. Raises PlaybookError."""
        if why := announced(sign):
            for spot in spots:
                self._suspect(spot, why)

    def recall(self, events: Iterable[Event]) -> None:
        """What a lost supervisor had found unfit stays so."""
        for event in events:
            if event.kind is Kind.PLACE_CHECKED and event.data["fit"] is False:
                self._bad.add((int(event.data["node"]), str(event.data["device"])))

    def look(self) -> None:
        """Take note of checks that are over. Never waits."""
        for answer in self._checker.take():
            self._over(answer)

    def close(self) -> None:
        """End what still runs. Safe to repeat."""
        self._checker.close()
        self._waiting = {}

    def _suspect(self, spot: Spot, why: str) -> None:
        if not self.avoids(spot):
            self._waiting[spot] = _Suspicion(why, self._now_s())
            self._checker.begin(spot)

    def _over(self, answer: Answer) -> None:
        """``fit`` None: nobody knows; then the place is used again, as without a check."""
        suspicion = self._waiting.pop(answer.spot, None)
        if suspicion is None:
            return
        node, device = answer.spot
        self._record(
            Kind.PLACE_CHECKED,
            node=node,
            device=device,
            why=suspicion.why,
            fit=answer.fit,
            said=answer.said,
            seconds=round(self._now_s() - suspicion.since_s, 3),
        )
        if answer.fit is False:
            self._bad.add(answer.spot)
        if answer.fit is not None:
            self._found(answer)
