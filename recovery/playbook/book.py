"""Looks signs up in the playbook. Pure; the file is read at the first question."""

from __future__ import annotations

import re
import signal as signals
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from trainchaos.chaos.errors import ChaosError
from trainchaos.recovery.playbook.entry import Entry, Tells
from trainchaos.recovery.playbook.rank import Findings, Match

FILE = Path(__file__).with_name("playbook.toml")
LONGEST_LINE = 8192
"""Of a longer line, both ends are searched: no expression may take long."""
LINES_AT_ONCE = 1000
SHELL_SIGNAL = 128
"""A shell reports a process that signal n ended as this plus n."""
BYTE, FATAL = 256, (4, 6, 7, 8, 9, 11, 15)
_XID = re.compile(r"\b(?:Xid|XID)\b(?: ?\([^)\n]{1,64}\))?:? ?(\d{1,4})\b")
_SXID = re.compile(r"\bSXid ?\([^)\n]{1,64}\): ?(\d{5})\b")
_SIGNALS = {signals.strsignal(n): n for n in signals.Signals if n < 32} | {"Segmentation fault": 11}
_WORDS = "|".join(filter(None, _SIGNALS))
_EXIT = re.compile(
    r"\b[Ee][Xx][Ii][Tt][ _-]?(?:[Cc]ode|CODE|[Ss]tatus)[\"']? *[:=]? *(-?\d{1,3})\b"
    r"|\b[Ee]xited with (?:exit )?(?:code|status):? *(-?\d{1,3})\b|\bExited \((\d{1,3})\)"
    r"|\breturn code = (-?\d{1,3})\b"
)
_SIGNAL = re.compile(
    r"\b(?:terminated|killed) (?:by|with) signal:? (\d{1,2}|SIG[A-Z]{3,5})\b"
    r"|\bgot signal: (3|10|12)\b|\bSignal (\d{1,2}) \(SIG\w{2,8}\) received"
    r"|\bexited on signal (\d{1,2})\b"
    r"|\bKILLED BY SIGNAL: (\d{1,2})\b|\bdied with <Signals\.(SIG\w{2,5})"
    rf"|\bline \d{{1,6}}: +\d{{1,9}} ({_WORDS})\b"
    rf"|\btasks? [\d,\[\]-]{{1,64}}: ({_WORDS})|\b({_WORDS}) +\(core dumped\)"
    r"|\bSignal: [A-Z][\w ]{1,30} \((\d{1,2})\)|\bfailed with signal (\d{1,2})\b"
)
_NAMED = (
    "Xid",
    "XID",
    "xit",
    "EXIT",
    "return code",
    "ignal",
    "SIGNAL",
    "task",
    "core dumped",
    "line ",
)
"""One of these is in every line that one of the four finds."""
_ORDER = {tells: number for number, tells in enumerate(Tells)}
AT = "  <- "
"""Between an exception and its place; not shown."""
MOST = 300  # characters of the place
_BEGINS = "Traceback (most recent call last)"
_PREFIX = re.compile(r"^(?:\[rank ?\d{1,7}\]:|\d{1,7}:|\([^()]{1,80}\)) ?")
"""Of torch, srun and Ray, which name who says a line."""
SHORTEST = 3
_SPECIAL = frozenset(".^$+)]}")
_OPENS = {"(": ")", "[": "]", "{": "}"}


class PlaybookError(ChaosError):
    """The playbook's file is damaged; the message names it and the place."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """``sources``: name -> address."""

    sources: dict[str, str]
    entry: list[Entry]


@dataclass(frozen=True, kw_only=True)
class Playbook:
    """Entries in the order of their file."""

    entries: tuple[Entry, ...]

    def by_id(self, name: str) -> Entry | None:
        """The entry of that id."""
        return self._signs.get(("id", name))

    def by_xid(self, number: int) -> Entry | None:
        """The entry of an NVIDIA XID."""
        return self._signs.get(("xid", number))

    def by_sxid(self, number: int) -> Entry | None:
        """The entry of an NVSwitch's SXid."""
        return self._signs.get(("sxid", number))

    def by_signal(self, which: int | str) -> Entry | None:
        """The entry of a signal by its number or its name, with or without ``SIG``."""
        return self._signs.get(("signal", signal_name(which)))

    def by_exit_code(self, code: int) -> Entry | None:
        """The entry of an exit code. 128 + n, as a shell reports it, and -n, as Python and torchrun
        do, are those of signal n.
        """
        if own := self._signs.get(("exit", code)):
            return own
        number = -code if code < 0 else code - SHELL_SIGNAL
        if BYTE - code in FATAL:  # -n of Python as the byte that a launcher passes on
            number = BYTE - code
        return self.by_signal(number) if number > 0 else None

    def match_text(self, lines: Iterable[str]) -> list[Match]:
        """What the lines of a log say, in the order of ``rank``. Of several entries that find one
        line the best counts: causes before hints, and hints before effects; then what takes work
        off the device; then by the order of the file.
        """
        findings = Findings()
        for number, line, entries in self._found(framed(lines), findings):
            findings.add(number, line.split(AT)[0], min(entries, key=self._rank))
        return findings.ordered()

    def _rank(self, entry: Entry) -> tuple[int, bool, int]:
        return _ORDER[entry.tells], not entry.move, self._places[entry.id]

    def _found(
        self, lines: Iterable[str], findings: Findings
    ) -> Iterator[tuple[int, str, list[Entry]]]:
        """Each line that entries find, in order, with those."""
        upcoming, before = iter(lines), 0
        while block := [shortened(line) for line in islice(upcoming, LINES_AT_ONCE)]:
            text = "\n".join(block)
            entries = [one for one in self._searched if _may_find(one, text)]
            named = any(word in text for word in _NAMED)
            for number, line in enumerate(block, start=before + 1):
                findings.pass_line(number, line)
                if not entries and not named:
                    continue
                found = [one for one in entries if one.finds(line)]
                found += self._named_in(line) if named else ()
                if found := [one for one in found if one.speaks_of(line)]:
                    yield number, line, found
            before += len(block)

    def _named_in(self, line: str) -> list[Entry]:
        """Entries whose number the line names."""
        named = [self.by_xid(int(found[1])) for found in _XID.finditer(line)]
        named += [self.by_sxid(int(found[1])) for found in _SXID.finditer(line)]
        named += self._ended(line)
        return [entry for entry in named if entry]

    def _ended(self, line: str) -> Iterator[Entry | None]:
        """What ends of processes that the line tells of mean."""
        for found in _EXIT.finditer(line):
            code = int(next(filter(None, found.groups())))
            yield self.by_exit_code(code) if code else None  # an exit code 0 explains nothing
        for found in _SIGNAL.finditer(line):
            word = next(filter(None, found.groups()))
            yield self.by_signal(_SIGNALS.get(word, word))

    @cached_property
    def _searched(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.pattern)

    @cached_property
    def _signs(self) -> dict[tuple[str, int | str], Entry]:
        return {sign: entry for entry in self.entries for sign in entry.signs}

    @cached_property
    def _places(self) -> dict[str, int]:
        return {entry.id: place for place, entry in enumerate(self.entries)}

    @property
    def xids(self) -> tuple[int, ...]:
        """Every XID that has an entry, in order."""
        return self._numbers("xid")

    @property
    def sxids(self) -> tuple[int, ...]:
        """Every SXid that has an entry, in order."""
        return self._numbers("sxid")

    def _numbers(self, kind: str) -> tuple[int, ...]:
        return tuple(sorted(int(n) for of, n in self._signs if of == kind))


def _may_find(entry: Entry, text: str) -> bool:
    """Whether the entry's expression finds something in lines that are joined."""
    assert entry.pattern is not None
    words = literals(entry.pattern.pattern)
    return (not words or any(word in text for word in words)) and bool(entry.pattern.search(text))


def shortened(line: str) -> str:
    """A line without its end; of one that is too long, both ends."""
    line = line.rstrip("\r\n")
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2
    return f"{line[:half]} ... {line[-half:]}"


def signal_name(which: int | str) -> str:
    """``SIGBUS`` of 7, "7", "bus" or "SIGBUS", as numbered on this machine; empty if there is no
    such signal.
    """
    text = str(which).strip().upper()
    if text.isascii() and text.isdigit() and len(text) <= 4:
        try:
            return signals.Signals(int(text)).name
        except ValueError:
            return ""
    name = text if text.startswith("SIG") else f"SIG{text}"
    return signals.Signals[name].name if name in signals.Signals.__members__ else ""


def read_playbook(path: Path = FILE) -> Playbook:
    """The playbook of a file. Raises PlaybookError."""
    try:
        tree = tomllib.loads(path.read_text())
        file = msgspec.convert(tree, _File, dec_hook=_pattern)
        named = [
            msgspec.structs.replace(one, sources=tuple(file.sources[name] for name in one.sources))
            for one in file.entry
        ]
    except (OSError, ValueError, KeyError, re.error) as error:
        raise PlaybookError(f"{path} is damaged: {error}") from error
    return Playbook(entries=tuple(named))


def _pattern(_: type, text: str) -> Any:
    """Case counts, and ``^`` and ``$`` stand for the ends of a line."""
    return re.compile(text, re.MULTILINE)


@cache
def playbook() -> Playbook:
    """The playbook that comes with this program. Raises PlaybookError if its file is damaged."""
    return read_playbook()


def by_xid(number: int) -> Entry | None:
    """See ``Playbook.by_xid``."""
    return playbook().by_xid(number)


def by_sxid(number: int) -> Entry | None:
    """See ``Playbook.by_sxid``."""
    return playbook().by_sxid(number)


def by_signal(which: int | str) -> Entry | None:
    """See ``Playbook.by_signal``."""
    return playbook().by_signal(which)


def by_exit_code(code: int) -> Entry | None:
    """See ``Playbook.by_exit_code``."""
    return playbook().by_exit_code(code)


def match_text(lines: Iterable[str]) -> list[Match]:
    """See ``Playbook.match_text``."""
    return playbook().match_text(lines)


def framed(lines: Iterable[str]) -> Iterator[str]:
    """Each line; one that ends a traceback has its innermost frame at its end."""
    inside, frame = False, ""
    for line in lines:
        bare = _PREFIX.sub("", line) if inside else line
        if _BEGINS in line:
            inside, frame = True, ""
        elif inside and bare[:1] in (" ", "\t", ""):
            said = bare.strip()
            frame = said if said.startswith("File ") else f"{frame} {said}"
        elif inside:
            inside = False
            yield f"{line.rstrip()}{AT}{frame[-MOST:]}" if frame else line
            continue
        yield line


@cache
def literals(pattern: str) -> tuple[str, ...]:
    """Texts of which one is in whatever a regular expression finds; looking for them first is many
    times faster. They are the longest literal of each alternative; empty if an alternative has none
    that is long enough. Groups and classes are left out, so it may miss some.
    """
    longest = [max(_runs(branch), key=len, default="") for branch in _branches(pattern)]
    return tuple(longest) if all(len(one) >= SHORTEST for one in longest) else ()


def _branches(pattern: str) -> Iterator[str]:
    """The alternatives that are in no group."""
    start = place = 0
    while place < len(pattern):
        if pattern[place] == "|":
            yield pattern[start:place]
            start = place + 1
        place = _after(pattern, place)
    yield pattern[start:]


def _runs(branch: str) -> Iterator[str]:
    """Its literals: characters in a row, of which none is optional."""
    run, place = "", 0
    while place < len(branch):
        char, following = branch[place], _after(branch, place)
        if char in "?*{":  # the character before it may be absent
            yield run[:-1]
            run = ""
        elif char == "\\" or char in _SPECIAL or char in _OPENS:
            yield run
            run = ""
        else:
            run += char
        place = following
    yield run


def _after(pattern: str, place: int) -> int:
    """The place after the character, escape, group or class that begins there."""
    char = pattern[place]
    if char == "\\":
        return place + 2
    if char not in _OPENS:
        return place + 1
    closes, place = _OPENS[char], place + 1
    if char == "[" and pattern[place : place + 1] in ("]", "^"):
        place += 2 if pattern[place : place + 2] == "^]" else 1
    while place < len(pattern) and pattern[place] != closes:
        if char == "(":
            place = _after(pattern, place)
        else:
            place += 2 if pattern[place] == "\\" else 1
    return place + 1
