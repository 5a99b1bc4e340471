"""The event log: every result is computed from these events and nothing else.

One writer and one append-only JSONL file per actor. A line reaches the kernel in a single
``write``, so a SIGKILL loses no whole line and tears at most the last one (a rank's lines go
through ``recovery.transport.event_ring``). A full disk does not stop the writer: events are dropped
but keep their numbers, and the next line that can be written names the gap. Times are nanoseconds
of the writer's host's monotonic clock, shared by all processes of a host; for ranks on other hosts,
``read_log`` converts them to the coordinator's clock (``chaos.events.clocks``).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter, lt
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from trainchaos.chaos.errors import LogError, NewerVersion
from trainchaos.chaos.events.budget import Budget, FileProblems
from trainchaos.chaos.events.clocks import Clocks
from trainchaos.chaos.events.event import Event, require_keys
from trainchaos.chaos.events.following import Tail
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.writer import EventWriter
from trainchaos.chaos.files import open_regular

__all__ = [
    "ORCHESTRATOR",
    "ActorLog",
    "Event",
    "EventWriter",
    "Kind",
    "Log",
    "Tail",
    "make_log",
    "read_actor",
    "read_log",
    "require_keys",
]

ORCHESTRATOR = "orchestrator"
LOG_VERSION = 1
"""Version of event logs: a newer one has events that an older judge would misread."""
MAX_LOG_BYTES = 512 << 20  # per actor; a larger file is not read
_T = TypeVar("_T")
_LONGEST = 200  # characters of a value quoted in a problem
MOST_SAID = 500
MAX_LINE_BYTES = 16 << 20  # far more than any event writer writes
_BLOCK = 1 << 16  # some hundred lines


@dataclass(frozen=True, kw_only=True)
class ActorLog:
    """Content of one file: its complete events in order, and its problems. ``unread``: the file was
    not read, for instance because it is too large.

    Checkers that look at all events look at ``kinds``, ``generations``, ``steps`` and ``times``:
    events are far apart in memory, so that to go through them takes several times as long.
    """

    actor: str
    events: tuple[Event, ...]
    problems: tuple[str, ...]
    ended: bool
    unread: bool = False

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kind of each event, in their order."""
        return [event.kind for event in self.events]

    @cached_property
    def generations(self) -> list[int]:
        """The generation of each event, in their order."""
        return [event.generation for event in self.events]

    @cached_property
    def steps(self) -> list[int | None]:
        """The step of each event, in their order."""
        return [event.step for event in self.events]

    @cached_property
    def times(self) -> list[int]:
        """The time of each event in nanoseconds, in their order."""
        return [event.time_ns for event in self.events]


class SenselessLog(LogError):
    """The log's values are not what events hold."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """All actors of one arm. ``events`` is ordered by (time, actor, seq); all times are by the
    coordinator's clock.
    """

    actors: Mapping[str, ActorLog]
    events: tuple[Event, ...]
    clocks: Clocks = field(default_factory=Clocks)

    def of(self, *kinds: Kind) -> Iterator[Event]:
        """Events of these kinds in time order."""
        if kinds not in self._found:
            places = [self._places[kind] for kind in {*kinds} if kind in self._places]
            found = places[0] if len(places) == 1 else sorted(chain(*places))
            self._found[kinds] = tuple(map(self.events.__getitem__, found))
        return iter(self._found[kinds])

    def by(self, actor: str) -> tuple[Event, ...]:
        """Events of an actor in time order."""
        return self._actors.get(actor, ())

    def once(self, what: str, make: Callable[[Log], _T]) -> _T:
        """What ``make`` derives from this log, made once and kept under the name ``what``."""
        if what not in self._derived:
            self._derived[what] = make(self)
        return cast(_T, self._derived[what])

    def forget(self) -> None:
        """Let go of all that was derived, which may refer to this log in turn."""
        self._derived.clear()

    @cached_property
    def _actors(self) -> Mapping[str, tuple[Event, ...]]:
        found: dict[str, list[Event]] = {}
        for event in self.events:
            found.setdefault(event.actor, []).append(event)
        return {actor: tuple(events) for actor, events in found.items()}

    @cached_property
    def _places(self) -> Mapping[Kind, array[int]]:
        """Kind -> where its events are in ``events``, found in one look through all of them."""
        found: dict[Kind, array[int]] = {}
        for place, event in enumerate(self.events):
            if (places := found.get(event.kind)) is None:
                places = found[event.kind] = array("I")
            places.append(place)
        return found

    @cached_property
    def _found(self) -> dict[tuple[Kind, ...], tuple[Event, ...]]:
        return {}

    @cached_property
    def _derived(self) -> dict[str, Any]:
        return {}

    def first(self, kind: Kind) -> Event | None:
        """The earliest event of a kind, or None."""
        return next(self.of(kind), None)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the files: gaps, torn or foreign lines, unexplained ends."""
        return tuple(problem for log in self.actors.values() for problem in log.problems)

    @property
    def unread(self) -> str:
        """Why a file was not read, in which case nothing is judged; "": all files were read."""
        return next((log.problems[0] for log in self.actors.values() if log.unread), "")

    @cached_property
    def clock_bounds_s(self) -> Mapping[str, float]:
        """Actor -> maximum error of its events' times; 0 where it shares our clock."""
        if self.clocks.one:
            return dict.fromkeys(self.actors, 0.0)
        bound = self.clocks.bound_ns
        return {
            name: max(map(bound, log.events), default=0) / 1e9 for name, log in self.actors.items()
        }

    @property
    def clock_bound_s(self) -> float:
        """Maximum error of any event's time."""
        return max(self.clock_bounds_s.values(), default=0.0)


def read_actor(path: Path, budget: Budget | None = None) -> ActorLog:
    """Read one actor's file. Gaps and broken lines become ``problems``; a torn last line is dropped
    and noted. A file of more than MAX_LOG_BYTES is not read at all, nor one that exceeds the budget
    of all files read together.
    """
    budget = budget or Budget()
    budget.begins()
    try:
        stream = open_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        return _unread(path, f"{path.name}: cannot be read: {error.strerror}")
    with stream:
        start, held = extent(stream)
        if held > MAX_LOG_BYTES:
            most = f"{MAX_LOG_BYTES / 1e6:.0f} MB"
            return _unread(
                path, f"{path.name}: holds {held / 1e6:.0f} MB, more than the {most} that are read"
            )
        found = None if budget.spent else _read_lines(path, stream, start, budget)
        return found or _unread(path, budget.refused(path.name))


def _unread(path: Path, problem: str) -> ActorLog:
    return ActorLog(actor=path.stem, events=(), problems=(problem,), ended=False, unread=True)


def _read_lines(path: Path, stream: BinaryIO, start: int, budget: Budget) -> ActorLog | None:
    """Read all lines; None: the budget is used up."""
    cut = skip_hole(stream, start)
    due, actor, number, torn = 0, path.stem, 0, 0
    events: list[Event] = []
    problems = FileProblems()
    if cut:
        problems.add(f"{path.name}: its first {cut} bytes were dropped")
    for raws, rest in line_blocks(stream):
        torn = rest
        for raw in raws:
            number += 1
            try:
                event = budget.read(raw, actor)
            except LogError as error:
                problems.add(f"{path.name}:{number}: {error.message}")
                continue
            if event is None:
                return None
            if event.seq != due or event.actor != actor or event.kind is Kind.EVENTS_DROPPED:
                before = events[-1].seq if events else None
                for problem in _out_of_place(actor, event, before, bool(cut)):
                    problems.add(f"{path.name}:{number}: {problem}")
            events.append(event)
            due = event.seq + 1
    if torn >= MAX_LINE_BYTES:
        problems.add(f"{path.name}:{number + 1}: a line of more than {MAX_LINE_BYTES} bytes")
    if torn:
        problems.add(f"{path.name}: last line is torn ({torn} bytes)")
    ended = bool(events) and events[-1].kind is Kind.ACTOR_ENDED
    return ActorLog(
        actor=path.stem, events=tuple(events), problems=problems.all(path.name), ended=ended
    )


def _out_of_place(actor: str, event: Event, before: int | None, cut: bool) -> Iterator[str]:
    """What is wrong with an event's actor or number. ``before``: number of the event before it."""
    if event.actor != actor:
        yield f"written by {event.actor[:_LONGEST]}"
    expected = 0 if before is None else before + 1
    if event.kind is Kind.EVENTS_DROPPED:
        first, last, why = (event.data[key] for key in ("first", "last", "why"))
        yield (
            f"events {str(first)[:_LONGEST]} to {str(last)[:_LONGEST]} were dropped:"
            f" {str(why)[:_LONGEST]}"
        )
        if type(last) is int and first == expected:
            expected = last + 1
    if event.seq != expected and (before is not None or not cut):
        yield f"seq {event.seq} where {expected} was due"


def make_log(actors: Iterable[ActorLog]) -> Log:
    """Merge actor logs, and note every actor that stopped without an end mark or an exit recorded
    by its supervisor.
    """
    logs = {log.actor: log for log in actors}
    clocks = Clocks()
    for event in logs[ORCHESTRATOR].events if ORCHESTRATOR in logs else ():
        clocks.observe(event)
    if not clocks.one:
        logs = {
            name: replace(log, events=tuple(map(clocks.corrected, log.events)))
            for name, log in logs.items()
        }
    made = Log(actors=logs, events=tuple(_merged(logs)), clocks=clocks)
    exits = {e.data["process"]: e.data for e in made.of(Kind.PROCESS_EXITED)}
    for name, log in logs.items():
        problem = _unexplained_end(log, exits)
        if problem:
            logs[name] = replace(log, problems=(*log.problems, problem))
    return made


def _merged(logs: Mapping[str, ActorLog]) -> list[Event]:
    """All events by (time, actor, seq). Logs that are in order are merged by their times alone,
    which compares and keeps less: a stable sort leaves the order of actors, and of each log.
    """
    named = [logs[name] for name in sorted(logs)]
    merged = [event for log in named for event in log.events]
    if all(map(_in_order, named)):
        merged.sort(key=attrgetter("time_ns"))
    else:
        merged.sort(key=attrgetter("time_ns", "actor", "seq"))
    return merged


def _in_order(log: ActorLog) -> bool:
    """Whether all lines are of one actor, and numbered upwards."""
    numbers = [event.seq for event in log.events]
    own = {event.actor for event in log.events} <= {log.actor}
    return own and all(map(lt, numbers, numbers[1:]))


def _unexplained_end(log: ActorLog, exits: Mapping[str, Mapping[str, Any]]) -> str | None:
    last = log.events[-1].seq if log.events else -1
    exited = exits.get(log.actor)
    claimed = exited["last_seq"] if exited is not None else None
    if claimed is not None and last < claimed:
        return f"{log.actor}.jsonl: ends at seq {last}, but the process had written {claimed}"
    if not log.ended and exited is None:
        return f"{log.actor}.jsonl: no end mark, and the exit of the process was not recorded"
    if not log.ended and exited is not None and exited["exit_code"] == 0:
        return f"{log.actor}.jsonl: no end mark, though the process ended well"
    return None


def read_log(directory: Path, budget: Budget | None = None) -> Log:
    """Read every ``*.jsonl`` of one arm. ``budget``: shared with other logs held at the same time.
    Raises LogError if there is none, SenselessLog if their values cannot be put in order, and
    NewerVersion if a newer version of this program wrote them.
    """
    files = sorted(directory.glob("*.jsonl"))
    if not files:
        raise LogError(
            f"no event log in {directory}",
            hint="name a run directory, such as runs/<scenario>/latest",
        )
    budget = budget or Budget()
    actors = [read_actor(path, budget) for path in files]
    try:
        log = make_log(actors)
        _refuse_newer(log, directory)
        return log
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise SenselessLog(
            f"what {directory} holds makes no sense: {type(error).__name__}: {error}"[:MOST_SAID],
            hint="it was changed, or is of another version",
        ) from error


def _refuse_newer(log: Log, directory: Path) -> None:
    """Raise NewerVersion for a log that a newer version of this program wrote. Logs from before
    versions were written are of version 1.
    """
    started = log.first(Kind.RUN_STARTED)
    version = started.data.get("log_version") if started is not None else None
    if type(version) is int and version > LOG_VERSION:
        raise NewerVersion(f"the log in {directory}", version, LOG_VERSION)


def extent(stream: BinaryIO) -> tuple[int, int]:
    """Where a file's data begins, after a removed beginning, and how many bytes it has."""
    try:
        start = os.lseek(stream.fileno(), 0, os.SEEK_DATA)
    except OSError:  # the file is empty, or the file system does not support SEEK_DATA
        start = 0
    return start, os.fstat(stream.fileno()).st_size - start


def skip_hole(stream: BinaryIO, start: int) -> int:
    """Seek to the first whole line if the file's beginning was removed; returns the number of bytes
    skipped.
    """
    stream.seek(start)
    zeros = start
    while block := stream.read(1 << 16):
        left = block.lstrip(b"\0")
        zeros += len(block) - len(left)
        if left:
            break
    stream.seek(zeros)
    if not zeros:
        return 0
    while (part := stream.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
        pass
    return stream.tell()


def line_blocks(stream: BinaryIO) -> Iterator[tuple[list[bytes], int]]:
    """The lines from here on, without their newlines, some hundred at a time; with the last ones
    the bytes of a torn line after them, else 0. A line of more than MAX_LINE_BYTES is taken for
    torn, and nothing after it is read.
    """
    while block := stream.read(_BLOCK):
        begun = len(block) - (block.rfind(b"\n") + 1)
        block += stream.readline(MAX_LINE_BYTES - begun)
        *lines, torn = block.split(b"\n")
        yield lines, len(torn)
        if torn:
            return
