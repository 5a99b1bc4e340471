"""Progress reports of a command: lines of the beacon's file, or output matched by a regular
expression.

Both come from a program that is not ours: lines are bounded, numbers are checked, nothing is
evaluated.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainchaos.chaos.beacon import SAID, VERSION
from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.harness.script.listen import numbers, rules

READ_LIMIT = 1 << 20  # bytes read in one look
LINE_LIMIT = 4096  # of a longer line only the beginning is read
KEPT_LINES = 12
RECENT_LINES = 400
MOST_RANKS = 1 << 16
STEP_LIMIT = 10**12
SAMPLES_LIMIT = 10**12
FOLLOW_EVERY_S = 0.2  # how often a file that a command writes is looked for
PID_LIMIT = 1 << 31
BUSY_LIMIT_S = 7 * 86_400.0
WHAT_LIMIT = 40  # characters, as the beacon writes
WHOLE_FRAMES = 3  # frames in succession that a later write ended: what has no end is one as well


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport:
    """One report. ``step``: in the program's count; ``time_ns``: the reporter's monotonic clock,
    None if not given; ``busy_s``: not a step, but the maximum time that the process does other work
    (0: that is over), ``what``: its name for that work; ``unread``: name -> text that was not a
    number; ``group``: the replica group that ``rank`` counts in; ``spoilt``: its gradient norm is
    no number, which some programs print beside a loss that is filtered; ``alone``: a loss in a line
    of its own, of the step read last.
    """

    step: int
    rank: int | None = None
    pid: int | None = None
    loss: float | None = None
    samples: int | None = None
    time_ns: int | None = None
    busy_s: float | None = None
    what: str = ""
    unread: Mapping[str, str] = field(default_factory=dict)
    group: int | None = None
    spoilt: bool = False
    alone: bool = False


class GrowingFile:
    """The whole lines of a growing file. ``last``: the newest lines, for people; ``recent``: more
    of them; ``count``: lines so far.

    ``taken``: bytes read so far; ``raised``: the newest lines about an exception raised by a point.

    A progress bar may begin its frames with a carriage return instead of ending them, so that the
    newest has no end. That it is whole shows in how the frames before it came: each ended with the
    first byte of the next write. A program whose output is buffered stops anywhere in a line.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.touch()
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._rest = b""
        self._cut = False
        self._given = False  # the last line was read without its end
        self._whole = 0  # frames in succession that ended with the first byte of a write
        self.count = self.taken = 0
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self.recent: deque[str] = deque(maxlen=RECENT_LINES)
        self.raised: deque[str] = deque(maxlen=KEPT_LINES)

    def read(self) -> Iterator[str]:
        """New lines, without line ends, each cut to ``LINE_LIMIT`` bytes."""
        data = os.read(self._fd, READ_LIMIT)
        self.taken += len(data)
        if data and (self._rest or self._cut):
            self._whole = self._whole + 1 if data[:1] in (b"\r", b"\n") else 0
        *lines, rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            given, self._given = self._given, False
            if self._cut:  # the rest of an overlong line
                self._cut = False
                continue
            text = self._noted(line)
            if text.strip() and not given:
                yield text
        if len(rest) > LINE_LIMIT:
            if not (self._cut or self._given):
                yield rest[:LINE_LIMIT].decode(errors="replace")
            self._cut, self._given, rest = True, False, b""
        self._rest = rest

    def unended(self, *, over: bool = False, sure: bool = False) -> Iterator[str]:
        """The last line, without waiting for its end, if it is whole; once. ``over``: its writer
        has ended, so that what comes next is another line; ``sure``: having written all it had.
        """
        whole = sure or self._whole >= (1 if over else WHOLE_FRAMES)
        text = self._rest.decode(errors="replace")
        found = whole and not self._given and bool(text.strip())
        if over:
            self._noted(self._rest)
            self._rest, self._cut, self._given = b"", False, False
        else:
            self._given = self._given or found
        if found:
            yield text

    def _noted(self, line: bytes) -> str:
        """The text of a line, which is kept for people."""
        text = line[:LINE_LIMIT].decode(errors="replace")
        if text.strip():
            self.count += 1
            self.last.append(text)
            self.recent.append(text)
            if SAID in text:
                self.raised.append(text)
        return text

    def looks_left(self) -> int:
        """How many reads reach the present end of the file, at least one."""
        return max(1, -(-(os.fstat(self._fd).st_size - self.taken) // READ_LIMIT))

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FollowedFile(GrowingFile):
    """The lines that a command writes to a file of its own, from now on. ``pattern``: its name,
    with wildcards where each start has another one: then the newest is read. It may come later, be
    written anew, or make way for another.
    """

    def __init__(self, pattern: Path) -> None:
        super().__init__(Path(os.devnull))
        self._pattern = pattern
        self._looked = 0.0
        self._read_ones = {self._key(path): path.stat().st_size for path in self._matching()}
        self._present = self._key(Path(os.devnull))

    def read(self) -> Iterator[str]:
        """As of any growing file."""
        if time.monotonic() - self._looked >= FOLLOW_EVERY_S:
            self._looked = time.monotonic()
            with suppress(FileNotFoundError):  # it went meanwhile
                self._turn()
        yield from super().read()

    def looks_left(self) -> int:
        """How many reads reach the present end of the file, at least one."""
        return max(1, -(-(os.fstat(self._fd).st_size - self._place()) // READ_LIMIT))

    def _place(self) -> int:
        return os.lseek(self._fd, 0, os.SEEK_CUR)

    def _turn(self) -> None:
        """To the newest file, from where it was read to; to the beginning of one that was cut."""
        size = os.fstat(self._fd).st_size
        if size < self._place():
            os.lseek(self._fd, 0, os.SEEK_SET)
        matching = self._matching()
        if not matching or self._place() < size:  # what is left of this one comes first
            return
        key = self._key(matching[-1])
        if key != self._present:
            fd = os.open(matching[-1], os.O_RDONLY | os.O_CLOEXEC)
            self._read_ones[self._present] = self._place()
            os.close(self._fd)
            self._fd = fd
            known = self._read_ones.get(key, 0)
            os.lseek(self._fd, min(known, os.fstat(self._fd).st_size), os.SEEK_SET)
            self._present = key

    def _matching(self) -> list[Path]:
        """Files of that name, the newest last."""
        below = self._pattern.anchor or "."
        found = Path(below).glob(str(self._pattern.relative_to(below)))
        return sorted((path for path in found if path.is_file()), key=_changed_ns)

    @staticmethod
    def _key(path: Path) -> tuple[int, int]:
        state = path.stat()
        return state.st_dev, state.st_ino


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it went meanwhile
        return 0


class BeaconReader:
    """Reports in the lines of ``chaos.beacon``, and the base of all readers. ``refused``: malformed
    lines; ``other_total``: what the newest line stated that stated another number of steps;
    ``drawn``: a bar stated that no step was done yet; ``unread``: the newest lines behind the last
    report.
    """

    source = "beacon"

    def __init__(self, lines: GrowingFile | None) -> None:
        self._lines = lines  # None: each is given to ``parse``
        self.refused = 0
        self.other_total: int | None = None
        self.drawn = False
        self.unread: deque[str] = deque(maxlen=RECENT_LINES)

    def read(self) -> list[ProgressReport]:
        """Reports since the last look."""
        lines = self._lines.read() if self._lines else ()
        return [progress for line in lines for progress in self.parse(line)]

    def read_unended(self, *, over: bool = False, sure: bool = False) -> list[ProgressReport]:
        """None: the beacon ends each line with the write that begins it."""
        return []

    def parse(self, line: str) -> list[ProgressReport]:
        """What one line reports; a malformed one is counted and dropped."""
        progress = parse_beacon(line)
        self.refused += progress is None
        return [] if progress is None else [progress]


class RegexReader(BeaconReader):
    """Reports in the command's output: every line that matches and whose step is a number, and
    every loss in a line of its own, of the step read last. ``steps``: how many the command trains;
    ``stated``: the lines state that of the run.
    """

    source = "output"

    def __init__(self, lines: GrowingFile | None, progress: RegexProgress, steps: int) -> None:
        super().__init__(lines)
        self.forms = rules.Forms(progress)
        self._steps = steps
        self._epochs_from, self._steps_from = progress.epochs_from, progress.steps_from
        self._epoch_steps = progress.epoch_steps
        self._last: ProgressReport | None = None
        self._epoch, self._high, self._longest = progress.epochs_from, 0, 0
        self._total = 0
        self.stated = False

    def read_unended(self, *, over: bool = False, sure: bool = False) -> list[ProgressReport]:
        """The report of a frame that no later one has ended yet. See ``GrowingFile.unended``."""
        lines = self._lines.unended(over=over, sure=sure) if self._lines else ()
        return [progress for line in lines for progress in self.parse(line)]

    def parse(self, line: str) -> list[ProgressReport]:
        """What one line reports: none, one, or one of each rank that wrote into it."""
        found = self._parse(line)
        if found:
            self.unread.clear()
        else:
            self.unread.append(line)
        return found

    def _parse(self, line: str) -> list[ProgressReport]:
        text = rules.plain(line)
        match = self.forms.step_in(text)
        if match is None:
            return self._loss_alone(text)
        groups = match.groupdict()
        of = numbers.whole(groups.get("of"), STEP_LIMIT)
        if of is not None and "epoch" not in groups and of != self._steps:
            self.other_total = of
            return []
        self.stated = self.stated or (of is not None and "epoch" not in groups)
        progress = _from_groups(groups)
        if progress is None:
            self.refused += 1
            return []
        if "loss" in progress.unread and (parts := rules.parted(match)):
            return [one for part in parts for one in self._parse(part)]
        if rules.spoilt(text):
            progress = replace(progress, spoilt=True)
        step = self._step_of_run(progress.step, groups, of)
        bar = "of" in groups or self._epoch_steps is not None
        in_epoch = step if "epoch" not in groups else progress.step - self._steps_from + 1
        if bar and min(step, in_epoch) <= 0:  # drawn before the first step, or the epoch's, is done
            self.drawn = self.drawn or (step <= 0 and self._last is None)
            return []
        if step != progress.step:
            progress = replace(progress, step=step)
        self._last = progress
        return [progress]

    def _step_of_run(self, step: int, groups: Mapping[str, str | None], of: int | None) -> int:
        """The step of the whole run, from 1. A line may leave out which epoch it is in, or how many
        steps that has: then it is the one before, and as many as an epoch had that was seen. A
        resumed epoch may state what is left of it: most that was stated counts.
        """
        if "epoch" not in groups:
            return step if of is None else step - self._steps_from + 1
        epoch = numbers.whole(groups["epoch"], STEP_LIMIT)
        if epoch is not None and epoch != self._epoch:
            self._longest = max(self._longest, self._high)
            self._epoch, self._high = epoch, 0
        self._high = max(self._high, step - self._steps_from + 1)
        self._total = max(of or 0, self._total)
        each = self._total or self._epoch_steps or self._longest
        epochs = self._epoch - self._epochs_from
        if epochs and not each:
            return step
        return epochs * each + step - self._steps_from + 1

    def _loss_alone(self, text: str) -> list[ProgressReport]:
        found = self.forms.loss_in(text) if self._last is not None else None
        if found is None or self._last is None:
            return []
        loss = numbers.real(found)
        unread = {"loss": loss.unread} if loss.unread else {}
        said = replace(self._last, loss=loss.value, samples=None, unread=unread, alone=True)
        return [replace(said, spoilt=rules.spoilt(text))]


def parse_beacon(line: str) -> ProgressReport | None:
    """A line of the beacon, or None if it is malformed: ``version time pid rank step loss
    samples``, or ``version time pid rank busy seconds word``.
    """
    words = line.split(" ")
    if len(words) != 7 or words[0] != str(VERSION):
        return None
    time_ns, pid = _word(words[1], 1 << 63), _word(words[2], PID_LIMIT)
    rank, step = _word(words[3], MOST_RANKS), _word(words[4], STEP_LIMIT)
    said = numbers.real("" if words[5] == "-" else words[5])
    if time_ns is None or pid is None:
        return None
    of = ProgressReport(step=step or 0, rank=rank, pid=pid, time_ns=time_ns)
    if words[4] == "busy" and said.value is not None and 0 <= said.value <= BUSY_LIMIT_S:
        return replace(of, busy_s=said.value, what=words[6][:WHAT_LIMIT])
    if step is None:
        return None
    unread = {"loss": said.unread} if said.unread else {}
    return replace(of, loss=said.value, samples=_word(words[6], SAMPLES_LIMIT), unread=unread)


def _word(text: str, limit: int) -> int | None:
    """A whole number in the beacon's format."""
    plain = text.isascii() and text.isdigit() and len(text) <= 19
    return int(text) if plain and int(text) < limit else None


def rank_number(text: str | None) -> int | None:
    """A rank or a count of ranks from an environment, None if it is malformed."""
    return None if text is None else _word(text, MOST_RANKS)


def group_number(text: str | None) -> int | None:
    """The number at the end of a replica group's name: ``3``, ``replica_3``; None if there
    is none.
    """
    digits = re.search(r"[0-9]+$", (text or "").strip())
    return rank_number(digits[0]) if digits else None


def _from_groups(groups: Mapping[str, str | None]) -> ProgressReport | None:
    step = numbers.whole(groups.get("step"), STEP_LIMIT)
    if step is None:
        return None
    loss = numbers.real(groups.get("loss"))
    rank = numbers.whole(groups.get("rank"), MOST_RANKS)
    samples = numbers.whole(groups.get("samples"), SAMPLES_LIMIT)
    unread = {"loss": loss.unread} if loss.unread else {}
    for name, value in (("rank", rank), ("samples", samples)):
        said = (groups.get(name) or "").strip()
        if value is None and said:
            unread[name] = said[: numbers.SHOWN]
    group = group_number(groups.get("group"))
    return ProgressReport(
        step=step, rank=rank, loss=loss.value, samples=samples, unread=unread, group=group
    )
