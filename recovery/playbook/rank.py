"""Orders what a log says by a model: what is likeliest to have failed first comes first.

Each finding has a score. Level: a cause above a hint above an effect. Device: one that is lost
takes everything along. Attempts: what ends each restart again outweighs what ended one. Report: the
launcher names who failed first. Progress: what the job went on after did not end it. Warnings weigh
less. What another finding explains comes after that one; what is left is ordered by time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from trainchaos.recovery.playbook.entry import Cause, Entry, Tells

LEVEL = {Tells.CAUSE: 30.0, Tells.HINT: 20.0, Tells.EFFECT: 10.0}
DEVICE, FIRST_FAILED, WARNING, WENT_ON, AGAIN = 4.0, 2.0, -11.0, -12.0, 3.0
"""No effect passes a hint by being frequent; a cause is behind hints where it is a warning, or the
job went on after it.
"""
MOST_ATTEMPTS = 3  # more restarts of one kind say no more
PROGRESS = 5
"""Steps after which a job went on: other ranks end the one they are in, and some run ahead."""
REPORT_LINES = 12  # of torchrun's report, about the rank that failed first
_OF_DEVICES = frozenset({Cause.DEVICE, Cause.DEVICE_MEMORY, Cause.BUS, Cause.GPU_LINK})

_PROGRESS = re.compile(r"\b(?:[Ss]tep|[Ii]ter|[Ii]teration)s?\b[\s:=\[\]/]{0,4}(\d{1,12})")
_ATTEMPT = re.compile(
    r"will restart worker group|Restarting worker group|restart_count=\d|attempts? left"
    r"|[Rr]estarting (?:the )?(?:job|training|container|pod)|Back-off restarting"
)
_FIRST_FAILED, _IGNORED = "Root Cause (first observed failure)", "Exception ignored in"
_WARNING = re.compile(
    r"\b(?:User|Future|Deprecation|Runtime|Resource)Warning:|\bWARN(?:ING)?\b|^W\d{4} "
)
_HARDENED = re.compile(r"NCCL WARN|torch[./]distributed|torch[./]elastic|c10d|torchrun")
"""Speakers whose warnings are how they report errors."""
_ASIDE = re.compile(
    r"(?i)\bNCCL INFO\b|\b(?:tensorboard|wandb|jupyter|mlflow|prometheus|dashboard|node_exporter)\b"
    r"|\bretry(?:ing)?\b(?! (?:exceeded|count|limit))|will (?:be )?retr|exception ignored in"
    r"|\bfall(?:ing )?back\b|\b(?:can be|safely|is|are|was|will be) ignored|\bnon-?critical\b"
    r"|\bnot fatal\b"
)
"""Who does not train, and whoever says that work goes on."""
_RAISED = re.compile(r"^\S{0,80}(?:Error|Exception|Interrupt)\b")
_CLOCK = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<time>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)"
    r"|^\[ *(?P<uptime>\d{1,9}\.\d{1,6})\]|\b[EWIF]\d{3,4} (?P<glog>\d\d:\d\d:\d\d\.\d{3,9})"
)
_WHO = re.compile(
    r"(?i)\[(rank ?\d+)\]|\b(rank ?[:=]? ?\d+)\b|NVRM: \w+ \(((?:PCI:)?[0-9a-f:.]+)\)"
    r"|^([\w.-]+:\d+:\d+ \[\d+\])|\b(pid[ =:]\d+)\b|\b(local_rank: \d+)\b"
)


@dataclass(frozen=True, kw_only=True)
class Match:
    """An entry, the first line that it was found in (``number`` from 1) and how many lines.

    ``who``: who speaks there, if the line says so; ``because``: id of the entry found beside it
    that explains it.
    """

    entry: Entry
    number: int
    line: str
    lines: int
    who: str = ""
    because: str = ""


@dataclass
class _Seen:
    match: Match
    attempts: set[int]
    progress: int  # before its last line
    reported: bool  # as what failed first
    warned: bool


class Findings:
    """Collects what the lines of one log say."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._last = self._step = ""
        self._asides: dict[str, _Seen] = {}
        self._attempt = self._progress = self._lines = 0
        self._report_ends = 0
        self._ignores = False  # a traceback that Python prints and passes over

    def pass_line(self, number: int, line: str) -> None:
        """Every line, before what is found in it."""
        self._lines += 1 if line and not line.isspace() else 0
        if self._ignores and _IGNORED not in self._last and _RAISED.search(self._last):
            self._ignores = False
        self._ignores |= _IGNORED in line
        self._last = line
        if ("estart" in line or "attempt" in line) and _ATTEMPT.search(line):
            self._attempt += 1
        elif _FIRST_FAILED in line:
            self._report_ends = number + REPORT_LINES
        elif (step := _PROGRESS.search(line)) and step[1] != self._step:
            self._step = step[1]  # that all ranks print the same one is no progress
            self._progress += 1

    def add(self, number: int, line: str, entry: Entry) -> None:
        """An entry that a line speaks of."""
        aside = self._ignores or _ASIDE.search(line)
        place = self._asides if aside else self._seen
        reported = number <= self._report_ends
        warned = bool(_WARNING.search(line)) and not _HARDENED.search(line)
        if (seen := place.get(entry.id)) is None:
            match = Match(entry=entry, number=number, line=line, lines=1, who=_who(line))
            place[entry.id] = _Seen(match, {self._attempt}, self._progress, reported, warned)
            return
        seen.match = replace(seen.match, lines=seen.match.lines + 1)
        seen.attempts.add(self._attempt)
        seen.progress = self._progress
        seen.reported |= reported
        seen.warned &= warned

    def ordered(self) -> list[Match]:
        """Best first. Of a single line the words count as they are; in a log, a line of who does
        not train, or that says itself that work goes on, is no finding.
        """
        found = {n: seen for n, seen in self._seen.items() if not self._overcome(seen)}
        if self._lines <= 1:
            found = self._asides | self._seen
        scores = {name: self._score(seen) for name, seen in found.items()}
        entries = {name: seen.match.entry for name, seen in found.items()}
        attempts = {name: seen.attempts for name, seen in found.items()}
        because = _explained(scores, entries, attempts)
        times = _times([seen.match for seen in found.values()])
        names = sorted(found, key=lambda name: (-scores[name], times[name]))
        return _with_orders(
            [replace(found[name].match, because=because.get(name, "")) for name in names]
        )

    def _score(self, seen: _Seen) -> float:
        entry = seen.match.entry
        score = LEVEL[entry.tells] + (DEVICE if entry.move else 0)
        if entry.tells is not Tells.EFFECT:
            score += AGAIN * (min(len(seen.attempts), MOST_ATTEMPTS) - 1)
        score += FIRST_FAILED if seen.reported else 0
        score += WARNING if seen.warned else 0
        return score + (WENT_ON if self._went_on(seen) else 0)

    def _went_on(self, seen: _Seen) -> bool:
        return self._progress - seen.progress >= PROGRESS

    def _overcome(self, seen: _Seen) -> bool:
        """No cause, and the job went on: a connection that came about later, an old restart."""
        return seen.match.entry.tells is not Tells.CAUSE and self._went_on(seen)


def _explained(
    scores: dict[str, float], entries: Mapping[str, Entry], attempts: Mapping[str, set[int]]
) -> dict[str, str]:
    """Who explains whom. Puts the scores of what is explained below those of what explains it."""
    because: dict[str, str] = {}
    for _ in entries:  # a chain is at most that long
        for name, entry in sorted(entries.items(), key=lambda one: -scores[one[0]]):
            for other in entry.explains:
                if other in scores:
                    scores[other] = min(scores[other], scores[name] - 0.5)
                    because.setdefault(other, name)
    if not scores:
        return because
    first = max(scores, key=lambda name: scores[name])
    if entries[first].tells is Tells.CAUSE:
        for name, entry in entries.items():
            together = attempts[name] & attempts[first]  # after a restart it is another failure
            if entry.tells is Tells.EFFECT and name != first and together:
                because.setdefault(name, first)
    return because


def _with_orders(found: list[Match]) -> list[Match]:
    """What the driver says that a device needs replaces the action of the error it goes with."""
    order = next((match.entry for match in found if match.entry.orders), None)
    if order is None or not found or found[0].entry.cause not in _OF_DEVICES:
        return found
    first = found[0].entry
    said = structs.replace(first, action=order.action, move=order.move, note=order.meaning)
    return [replace(found[0], entry=said if first.id != order.id else first), *found[1:]]


def _times(found: Iterable[Match]) -> dict[str, tuple[float | str, int]]:
    """By the clock where all lines have the same one, else by their order."""
    clocks = {match.entry.id: _clock(match.line) for match in found}
    numbers = {match.entry.id: match.number for match in found}
    same = len({form for form, _ in clocks.values()}) == 1
    return {name: (time if same else 0.0, numbers[name]) for name, (_, time) in clocks.items()}


def _clock(line: str) -> tuple[str, float | str]:
    found = _CLOCK.search(line)
    if found is None:
        return "", 0.0
    if found["uptime"]:
        return "uptime", float(found["uptime"])
    if found["glog"]:
        return "glog", found["glog"]
    return "date", f"{found['date']} {found['time'].replace(',', '.')}"


def _who(line: str) -> str:
    found = _WHO.search(line)
    return next((one for one in found.groups() if one), "") if found else ""
