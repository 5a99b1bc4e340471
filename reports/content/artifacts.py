"""The files of a run that its report refers to: what exists, and the last lines of what was
printed.

Nothing is read or linked through a symbolic link: it could lead out of the run.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.files import open_regular
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import ArmResult, Results

OF_A_RUN = (
    "results.json",
    "summary.md",
    "junit.xml",
    "trace.json",
    "metrics.prom",
    "gate.md",
    "gate.json",
    "gate.xml",
    "scenario.resolved.yaml",
    "seal.json",
    "system.json",
)
MAX_LINKS = 300
MAX_FILES = 8
MAX_TAILS = 8
TAIL_LINES = 20
TAIL_BYTES = 8 << 10
LINE_CHARACTERS = 240
_MOST_ENTRIES = 1000


@dataclass(frozen=True, kw_only=True)
class Link:
    """A file of the run, and its address relative to the report."""

    name: str
    address: str
    size: int


@dataclass(frozen=True, kw_only=True)
class ArmLogs:
    """The outputs of an arm's processes; ``empty``: files without a byte; ``more``: not listed."""

    arm: ArmResult
    links: tuple[Link, ...]
    empty: int
    more: int


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The last lines of a file; ``cut``: there were more before."""

    link: Link
    lines: tuple[str, ...]
    cut: bool


@dataclass(frozen=True, kw_only=True)
class ArmTails:
    """What the processes of an arm that did not end well printed last; ``more``: files left out."""

    arm: ArmResult
    tails: tuple[Tail, ...]
    more: int


def link_to(root: Path, *parts: str) -> Link | None:
    """A link to a regular file below ``root``; None if it is none, or behind a symbolic link."""
    path = root
    try:
        for part in parts[:-1]:
            path = path / part
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                return None
        found = os.lstat(path / parts[-1])
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    address = "/".join(quote(os.fsencode(part), safe="=,") for part in parts)
    return Link(name=parts[-1], address=address, size=found.st_size)


def of_the_run(run: RunDirectory) -> list[Link]:
    """The files beside the report."""
    return [link for name in OF_A_RUN if (link := link_to(run.root, name)) is not None]


def logs(run: RunDirectory, results: Results) -> tuple[list[ArmLogs], int]:
    """The outputs of every arm that left any, and how many arms were left out because
    ``MAX_LINKS`` are on the page.
    """
    found: list[ArmLogs] = []
    links = 0
    for number, arm in enumerate(results.arms):
        if links >= MAX_LINKS:
            return found, len(results.arms) - number
        one = _logs_of(run, arm)
        if one.links or one.empty:
            links += len(one.links)
            found.append(one)
    return found, 0


def _logs_of(run: RunDirectory, arm: ArmResult) -> ArmLogs:
    folder, names = arm.id, list[str]()
    with suppress(OSError, ValueError, LogError):
        where = run.logs(arm.id)
        folder = where.name
        with os.scandir(where) as entries:
            names = sorted(entry.name for entry in islice(entries, _MOST_ENTRIES))
    found = [link for name in names if (link := link_to(run.root, "logs", folder, name))]
    told = [link for link in found if link.size]
    return ArmLogs(
        arm=arm,
        links=tuple(told[:MAX_FILES]),
        empty=len(found) - len(told),
        more=max(0, len(told) - MAX_FILES),
    )


def tails(run: RunDirectory, results: Results) -> tuple[list[ArmTails], int]:
    """The last output of each arm that did not complete, and how many such arms are left out. An
    arm whose processes printed nothing is not one of them.
    """
    found: list[ArmTails] = []
    printed = ((arm, _logs_of(run, arm)) for arm in results.arms if arm.outcome != "completed")
    known = [(arm, logs) for arm, logs in printed if logs.links]
    for arm, logs in known[:MAX_TAILS]:
        read = [t for link in logs.links if (t := _tail(run.logs(arm.id) / link.name, link))]
        if read:
            found.append(ArmTails(arm=arm, tails=tuple(read), more=logs.more))
    return found, max(0, len(known) - MAX_TAILS)


def _tail(path: Path, link: Link) -> Tail | None:
    try:
        with open_regular(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            text = stream.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return None
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    kept = (
        one if len(one) <= LINE_CHARACTERS else f"{one[:LINE_CHARACTERS]}…"
        for one in lines[-TAIL_LINES:]
    )
    cut = size > TAIL_BYTES or len(lines) > TAIL_LINES
    return Tail(link=link, lines=tuple(kept), cut=cut)
