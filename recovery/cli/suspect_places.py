"""Places that a job's processes leave alone until they are known to be fit: those that failed by a
cause that hardware may have, or were warned of.

A place is checked in the background, by a program in a process of its own, from the moment that it
becomes suspect. No recovery waits for it: until the check is over, and for good if it finds the
place unfit, processes start there only where there is no other place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.health.credible import announced
from trainchaos.recovery.health.readings.signs import Sign
from trainchaos.recovery.playbook.book import match_text
from trainchaos.recovery.playbook.entry import Owner
from trainchaos.recovery.policy.strategy import Cause

LIMIT_S = 90.0
"""For one check: ``harness.preflight.preflight.fit`` measures for 20 s at the most, after a start
that imports torch, and ends its own processes within 25 s.
"""
MOST_AT_ONCE = 1
"""Checks at once: each takes a core and memory beside the job."""
MOST_OUTPUT = 65_536
END_S = 5.0
Spot = tuple[int, str]
"""Node and device."""


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


@dataclass(kw_only=True)
class _Check:
    spot: Spot
    why: str
    since_s: float
    process: subprocess.Popen[bytes] | None = None
    output: IO[bytes] = field(default_factory=tempfile.TemporaryFile)


class SuspectPlaces:
    """``command``: called with the device as last argument; prints a line of JSON, ``fit`` (true,
    false, null) and ``said`` (words). ``record``: writes an event; ``unfit``: called with the node,
    the device and the words of a place that is unfit. Always ``close``: its program is ended then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        record: Callable[..., Any],
        unfit: Callable[[int, str, str], None],
        now_s: Callable[[], float],
    ) -> None:
        self._command, self._record, self._unfit, self._now_s = command, record, unfit, now_s
        self._waiting: dict[Spot, _Check] = {}
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

    def look(self) -> None:
        """Begin the checks that are due, and take note of those that are over. Never waits."""
        running = [check for check in self._waiting.values() if check.process is not None]
        for check in running:
            assert check.process is not None
            late = self._now_s() - check.since_s > LIMIT_S
            if late or _ended(check.process):
                self._over(check, late=late)
        free = MOST_AT_ONCE - sum(c.process is not None for c in self._waiting.values())
        due = [check for check in self._waiting.values() if check.process is None]
        for check in due[: max(0, free)]:
            self._begin(check)

    def close(self) -> None:
        """End what still runs. Safe to repeat."""
        for check in self._waiting.values():
            if check.process is not None:
                _end(check.process)
            check.output.close()
        self._waiting = {}

    def _suspect(self, spot: Spot, why: str) -> None:
        if not self.avoids(spot):
            self._waiting[spot] = _Check(spot=spot, why=why, since_s=self._now_s())

    def _begin(self, check: _Check) -> None:
        check.since_s = self._now_s()
        try:
            check.process = subprocess.Popen(
                [*self._command, check.spot[1]],
                stdin=subprocess.DEVNULL,
                stdout=check.output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._close(check, None, [f"cannot be checked: {error.strerror}"])

    def _over(self, check: _Check, *, late: bool) -> None:
        assert check.process is not None
        _end(check.process)
        if late:
            # A device that does not answer is what the check looks for.
            self._close(check, False, [f"no answer within {LIMIT_S:g} s"])
            return
        check.output.seek(0)
        lines = check.output.read(MOST_OUTPUT).decode(errors="replace").splitlines()
        found = _answer(lines)
        if found is None:
            self._close(check, None, [f"its check ended with {check.process.returncode}"])
        else:
            said = found.get("said")
            words = [str(one) for one in said] if isinstance(said, list) else []
            fit = found.get("fit")
            self._close(check, fit if isinstance(fit, bool) else None, words)

    def _close(self, check: _Check, fit: bool | None, said: Sequence[str]) -> None:
        """``fit`` None: nobody knows; then the place is used again, as without a check."""
        check.output.close()
        del self._waiting[check.spot]
        node, device = check.spot
        words = "; ".join(said)[:1000]
        self._record(
            Kind.PLACE_CHECKED,
            node=node,
            device=device,
            why=check.why,
            fit=fit,
            said=words,
            seconds=round(self._now_s() - check.since_s, 3),
        )
        if fit is False:
            self._bad.add(check.spot)
            self._unfit(node, device, words or "unfit")


def _answer(lines: Sequence[str]) -> Mapping[str, Any] | None:
    """The last line that is an answer."""
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and "fit" in found:
            return found
    return None


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a program has ended; it stays to be reaped, so that its group keeps its number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program that is not reaped yet, and what is left of its group, and reap it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)  # else the kernel waits for a device: it dies as that answers
