"""Reads an answer of NCCL's RAS that was kept in a file, in its text form or as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from trainchaos.recovery.detection.ras import Behind, Missing, RasFinding, read_json

_GROUP = re.compile(r"^ *(\d{1,9}) +(\d{1,9}) +\d{1,9} +[\d-]{1,19} +\d{1,9} +\d{1,9} +([A-Z]+) ")
_TITLE = re.compile(r"^#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,16})\) ([A-Z]+)\s*$")
_ALL = re.compile(r"^(INCOMPLETE|DEAD|TIMEOUT)\s*$")
_DIFFERENT = re.compile(r"^ *Communicator ranks have different (.{1,40}) operation counts")
_LAUNCHED = re.compile(
    r"^ *(?:\d{1,9} ranks have|Rank \d{1,9} has)"
    r" (?:launched up to operation (\d{1,18})|not launched any operations)"
)
_RANK = re.compile(
    r"^ *Rank (\d{1,9})\b.{0,80}? -- GPU .{1,40} managed by process (\d{1,9}) on node (\S{1,255})"
)
_PROCESS = re.compile(r"^ *Process (\d{1,9}) on node (\S{1,255}) managing GPU")
_KEYS = ('"nccl_version"', '"communicators"')
_JOB = "Job summary"
_RUNNING = ("INIT", "RUNNING")
LOOKED_AT = 40
"""Lines at the beginning of a file, in which an answer shows that it is one."""


def is_answer(head: Iterable[str]) -> bool:
    """Whether a file that begins with these lines is an answer of RAS, and nothing else."""
    lines = [line.strip() for line in head if line.strip()]
    if not lines:
        return False
    if lines[0].startswith("{"):
        return all(any(key in line for line in lines) for key in _KEYS)
    return _JOB in lines and lines[0].startswith(("NCCL version ", _JOB))


def read_answer(lines: Iterable[str]) -> RasFinding:
    """What a kept answer says. Raises RasError if it is JSON of another form.

    The text names ranks that lag only where they are few, unless it was asked for with ``-v``.
    """
    lines = [*lines]
    if any(line.strip() for line in lines) and "".join(lines).lstrip().startswith("{"):
        return read_json("\n".join(lines))
    reader = _TextReader()
    for line in lines:
        reader.take(line)
    return reader.finding()


class _TextReader:
    """Reads line by line: who is named counts for the title above."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[int, str]] = {}  # communicators, status
        self._title = self._communicator = self._collective = ""
        self._used = True
        self._count = 0
        self._missing: dict[tuple[int, str], Missing] = {}
        self._behind: list[Behind] = []
        self._most: dict[tuple[str, str], int] = {}

    def take(self, line: str) -> None:
        if group := _GROUP.match(line):
            self._groups[group[1]] = int(group[2]), group[3]
        elif title := _TITLE.match(line):
            self._communicator, self._title, self._collective = f"0x{title[2]}", title[3], ""
            self._used = self._groups.get(title[1], (0, "RUNNING"))[1] in _RUNNING
        elif every := _ALL.match(line):
            self._title, self._communicator = every[1], ""
        elif self._title == "MISMATCH":
            self._mismatch(line)
        elif self._title in ("INCOMPLETE", "DEAD"):
            self._absent(line)

    def _mismatch(self, line: str) -> None:
        if different := _DIFFERENT.match(line):
            self._collective = different[1]
        elif not line.strip() or "status" in line:
            self._collective = ""
        if not self._collective or not self._used:
            return
        key = self._communicator, self._collective
        if launched := _LAUNCHED.match(line):
            self._count = int(launched[1] or 0)
            self._most[key] = max(self._count, self._most.get(key, 0))
        if rank := _RANK.match(line):
            self._behind.append(
                Behind(
                    rank=int(rank[1]),
                    pid=int(rank[2]),
                    host=rank[3],
                    communicator=self._communicator,
                    collective=self._collective,
                    count=self._count,
                    others=0,
                )
            )

    def _absent(self, line: str) -> None:
        rank, process = _RANK.match(line), _PROCESS.match(line)
        if rank:
            seen = Missing(rank=int(rank[1]), pid=int(rank[2]), host=rank[3], dead=False)
        elif process:
            dead = self._title == "DEAD"
            seen = Missing(rank=None, pid=int(process[1]), host=process[2], dead=dead)
        else:
            return
        before = self._missing.get((seen.pid, seen.host), seen)
        number = before.rank if before.rank is not None else seen.rank
        self._missing[seen.pid, seen.host] = replace(
            seen, rank=number, dead=seen.dead or before.dead
        )

    def finding(self) -> RasFinding:
        """What was read. It is not told which ranks also exchange between two."""
        behind = [
            replace(one, others=most)
            for one in self._behind
            if one.count < (most := self._most[one.communicator, one.collective])
        ]
        return RasFinding(
            communicators=sum(count for count, _ in self._groups.values()),
            missing=tuple(self._missing.values()),
            behind=tuple(behind),
            unsure=True,
        )
