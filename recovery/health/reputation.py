"""The reputation of a job's places: what is held against a node or a device, and what follows.

Reasons come in: a process failed there, or gave wrong values; a driver or a detector announces that
the place will fail; a check finds it unfit. Decisions come out: whether a process should start
elsewhere if it can, who is warned, and what is tainted for later jobs.

A suspect place is checked in the background, where a user asked for it. No recovery waits for it:
until the check is over, and for good if it finds the place unfit, processes start there only where
there is no other place.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from trainchaos.chaos.errors import ChaosError
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.health.checks import Answer, Checker, Spot
from trainchaos.recovery.health.signs import MODELS, HealthReport, Sign, announced
from trainchaos.recovery.health.taints import MAX_TEXT, TaintList, made
from trainchaos.recovery.playbook.book import match_text
from trainchaos.recovery.playbook.entry import Owner
from trainchaos.recovery.policy.backoff import BackoffSchedule
from trainchaos.recovery.policy.strategy import ANNOUNCED, Cause
from trainchaos.recovery.process.output import say

NOT_OF_A_PLACE = frozenset({*ANNOUNCED, Cause.NONFINITE})
"""Causes of failures that say nothing of the place where the process was."""
CLOSE_LIMIT_S = 5.0
"""For taints that are still to be written at the end. Writing takes milliseconds unless another
process holds the list (``recovery.health.taints.LOCK_LIMIT_S``).
"""
FAILURES_REMEMBERED = 32

Where = tuple[int | None, str | None]
"""Node and device; None: all of them."""


class Reputation:
    """What is held against places. ``now_s``: the clock."""

    ROW = BackoffSchedule(free=2, first_s=60.0, most_s=3600.0)
    """Failures of processes in a row, after which a place is avoided for a while."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._failures: dict[Where, deque[float]] = defaultdict(
            lambda: deque(maxlen=FAILURES_REMEMBERED)
        )
        self._announced: set[Where] = set()
        self._distrusted: set[Where] = set()
        self._doubted: set[Where] = set()

    def failed(self, place: Where, at_s: float | None = None) -> None:
        """A process failed there, now or at another time."""
        self._failures[place].append(self._now_s() if at_s is None else at_s)

    def announce(self, place: Where) -> None:
        """It is about to fail."""
        self._announced.add(place)

    def distrust(self, place: Where) -> None:
        """It gave wrong values."""
        self._distrusted.add(place)

    def doubt(self, spot: Spot) -> bool:
        """It is suspect, or was found unfit. False: that was known."""
        known = spot in self._doubted
        self._doubted.add(spot)
        return not known

    def trust(self, spot: Spot, *, fit: bool) -> None:
        """It is no longer suspect. ``fit``: it was found fit, and is not about to fail either."""
        self._doubted.discard(spot)
        if fit:
            self._announced -= {spot, (None, spot[1])}

    def about_to_fail(self, spot: Spot) -> bool:
        """Whether that was announced."""
        return _means(self._announced, spot)

    def suspect(self, spot: Spot) -> bool:
        """Whether its values are not to be trusted, as far as is known."""
        return spot in self._doubted or _means(self._distrusted, spot)

    def keeps_failing(self, place: Where, now_s: float | None = None) -> bool:
        """Whether processes failed there again and again, the last a short while ago."""
        if (failures := self._failures.get(place)) is None:
            return False
        return (self._now_s() if now_s is None else now_s) < self.ROW.again_s(failures)

    def spurns(self, node: int, now_s: float) -> bool:
        """Whether a node as a whole is about to fail, or processes keep failing there."""
        return (node, None) in self._announced or self.keeps_failing((node, None), now_s)

    def avoids(self, spot: Spot) -> bool:
        """Whether a process should start elsewhere, if it can."""
        return self.about_to_fail(spot) or self.suspect(spot) or self.keeps_failing(spot)


def _means(places: Collection[Where], spot: Spot) -> bool:
    node, device = spot
    return bool(places) and any(each in places for each in (spot, (node, None), (None, device)))


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


@dataclass(frozen=True, kw_only=True)
class Care:
    """What a user asks for. ``checker``: of suspect places, None: they are not checked; ``taints``:
    the list to add to, None: nothing is tainted.
    """

    checker: Checker | None = None
    taints: TaintList | None = None


NO_CARE = Care()


class Places(Protocol):
    """Where the processes of a job are. A device's name is the same as in the signs."""

    def living(self) -> Iterable[str]:
        """Processes that are neither gone nor asked to end."""

    def gone(self, process: str) -> bool:
        """Whether its exit is known."""

    def spot_of(self, name: str) -> Spot | None:
        """Node and device of a process whose exit is not answered yet."""

    def spots_in_use(self) -> Collection[Spot]:
        """Those of all such processes."""


class Warned(Protocol):
    """The supervisor; ``recovery.supervise.controller.Controller`` says what each call means."""

    def on_warnings(self, warnings: Mapping[str, str]) -> None:
        """Process -> why its place is about to fail."""

    def no_better_place(self, processes: Iterable[str]) -> None:
        """These were started at a place that is about to fail."""


class PlaceCare:
    """Turns what is found at the places of one job into their ``reputation``, checks, warnings and
    taints. ``record``: writes an event; ``name_of``: by which name a taint means a node. Always
    ``close``.
    """

    def __init__(
        self,
        care: Care,
        where: Places,
        reputation: Reputation,
        record: Callable[..., Any],
        now_s: Callable[[], float],
        name_of: Callable[[int], str],
    ) -> None:
        self._checker, self._list = care.checker, care.taints
        self._where, self._reputation = where, reputation
        self._record, self._now_s, self._name_of = record, now_s, name_of
        self._checking: dict[Spot, tuple[str, float]] = {}  # why, since when
        self._warnings: dict[str, str] = {}
        self._announced = False
        self._tainted: set[tuple[str, str]] = set()
        self._writers: list[threading.Thread] = []
        self._written: deque[tuple[str, str, str]] = deque()

    def failed(self, process: str, cause: str, detail: str) -> None:
        """A process failed; ``cause`` and ``detail`` as in ``failure_detected``. Raises
        PlaybookError.
        """
        spot = self._where.spot_of(process)
        if self._checker is not None and spot and (why := why_suspect(cause, detail)):
            self._check(spot, why)

    def heard(self, sign: Sign, holder: str | None) -> None:
        """Something was found; most of it announces no failure. ``holder``: the process that holds
        the rank that the sign names: a rank goes before its device, a device before its node.
        Raises PlaybookError.
        """
        if not (why := announced(sign)):
            return
        spots = self._spots(sign, holder)
        for spot in spots if self._checker is not None else ():
            self._check(spot, why)
        self._warn(sign, holder, why)
        if self._list is None or getattr(sign, "source", "") == "injected":
            return
        known = (
            {"what", "code"} if isinstance(sign, HealthReport) else {"what", "value", "threshold"}
        )
        evidence = sign.model_dump(include=known)
        if sign.device is None and sign.rank is None:
            spots = [] if sign.node is None else [(sign.node, "cpu")]
        for spot in spots:
            self._taint(self._list, spot, why, evidence, by="alarm")

    def recall(self, events: Sequence[Event]) -> None:
        """Hear again what a lost supervisor had recorded of places: it may not have acted on it. A
        report about a rank is left out, as another process may hold the rank by now, and one about
        a device that was found fit since.
        """
        fit: set[tuple[Any, Any]] = set()  # found so later
        signs: list[Event] = []
        for event in reversed(events):
            spot = event.data.get("node") or 0, event.data.get("device")
            if event.kind is Kind.PLACE_CHECKED:
                fit |= {spot} if event.data["fit"] else set()
                if event.data["fit"] is False:
                    self._reputation.doubt((int(spot[0]), str(spot[1])))
            elif event.kind in MODELS and event.data.get("rank") is None and spot not in fit:
                signs.append(event)
        for event in reversed(signs):
            with suppress(ValidationError):  # written by another version
                self.heard(MODELS[event.kind].model_validate(event.data), None)

    def look(self, supervise: Callable[[Callable[[Warned], None]], object]) -> None:
        """Go on with checks, record what was tainted, and warn. Never waits. ``supervise``: calls
        back with the supervisor, if there is one: each warning is repeated until its process is
        gone, as a supervisor may be lost before it acts on one.
        """
        for answer in self._checker.take() if self._checker is not None else ():
            self._checked(answer)
        self._note_taints()
        if not self._announced:
            return
        where = self._where
        self._warnings = {name: why for name, why in self._warnings.items() if not where.gone(name)}
        late = [
            name
            for name in where.living()
            if name not in self._warnings
            and (spot := where.spot_of(name)) is not None
            and self._reputation.about_to_fail(spot)
        ]
        supervise(lambda controller: controller.on_warnings(self._warnings))
        supervise(lambda controller: controller.no_better_place(late))

    def close(self) -> None:
        """End checks, and write the last taints. Safe to repeat."""
        if self._checker is not None:
            self._checker.close()
            self._checking = {}
        until_s = time.monotonic() + CLOSE_LIMIT_S
        for writer in self._writers:
            writer.join(max(0.0, until_s - time.monotonic()))  # a daemon, if the list is held
        self._note_taints()

    # ---- suspect places

    def _check(self, spot: Spot, why: str) -> None:
        if self._checker is not None and self._reputation.doubt(spot):
            self._checking[spot] = why, self._now_s()
            self._checker.begin(spot)

    def _checked(self, answer: Answer) -> None:
        """``fit`` None: nobody knows; then the place is used again, as without a check."""
        if answer.spot not in self._checking:
            return
        why, since_s = self._checking.pop(answer.spot)
        node, device = answer.spot
        self._record(
            Kind.PLACE_CHECKED,
            node=node,
            device=device,
            why=why,
            fit=answer.fit,
            said=answer.said,
            seconds=round(self._now_s() - since_s, 3),
        )
        if answer.fit is not False:
            self._reputation.trust(answer.spot, fit=bool(answer.fit))
        elif self._list is not None and not answer.emulated:
            said = _printable(answer.said) or "unfit"
            evidence = {"check": "before a rejoin", "said": said[:200]}
            self._taint(self._list, answer.spot, f"preflight: {said}", evidence, by="preflight")

    # ---- places that are about to fail

    def _spots(self, sign: Sign, holder: str | None) -> list[Spot]:
        """The places that a sign means: of the smallest that it names."""
        if sign.rank is not None:
            spot = None if holder is None else self._where.spot_of(holder)
            return [] if spot is None else [spot]
        if sign.device is not None:
            return [(sign.node or 0, sign.device)]
        return [spot for spot in self._where.spots_in_use() if spot[0] == (sign.node or 0)]

    def _warn(self, sign: Sign, holder: str | None, why: str) -> None:
        self._announced = True
        node, device = place = sign.node, sign.device
        if sign.rank is not None:
            names = [] if holder is None or self._where.gone(holder) else [holder]
        else:
            at = {name: self._where.spot_of(name) for name in self._where.living()}
            names = [name for name, spot in at.items() if spot and _means({place}, spot)]
        if device is not None or (sign.rank is None and node is not None):
            self._reputation.announce(place)
        where = device if node is None or device is None or "@" in device else f"{device}@{node}"
        named = where or (f"node {node}" if sign.rank is None else f"rank {sign.rank}")
        for name in names:
            self._warnings.setdefault(name, f"{why}, on {named}")

    # ---- taints

    def _taint(
        self,
        taints: TaintList,
        spot: Spot,
        why: str,
        evidence: dict[str, Any],
        *,
        by: Literal["alarm", "preflight"],
    ) -> None:
        """Have a place tainted, each for each reason once, by a thread: another process may hold
        the list for long. A device is named without its node (``cuda:3@n1``); a host's processors
        are all one place.
        """
        host, device = self._name_of(spot[0]), spot[1].partition("@")[0]
        where = {"node": host} if device == "cpu" else {"device": f"{host}/{device}"}
        (place,) = where.values()
        if (place, why) in self._tainted:
            return
        self._tainted.add((place, why))
        reason = _printable(why)[:MAX_TEXT]
        since = datetime.now(UTC)
        fields = {**where, "reason": reason, "by": by, "since": since, "evidence": evidence}

        def write() -> None:
            failed = ""
            try:
                taints.add(made(fields), since)
            except ChaosError as error:
                failed = str(error)
            self._written.append((place, by, failed))

        writer = threading.Thread(target=write, name="taint", daemon=True)
        self._writers = [each for each in self._writers if each.is_alive()] + [writer]
        writer.start()

    def _note_taints(self) -> None:
        for _ in range(len(self._written)):
            place, by, failed = self._written.popleft()
            if failed:
                say(f"{place} could not be tainted: {failed}")
            else:
                self._record(Kind.PLACE_TAINTED, place=place, by=by)


def _printable(text: str) -> str:
    """A text as a taint may have it."""
    return "".join(char if char.isprintable() else " " for char in text)
