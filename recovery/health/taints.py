"""Hardware that is not to be used: taints, and the list of them that outlives a job.

The list is one file that every launcher reads, and that commands, checks and persons add to: YAML
(or JSON, which YAML contains)::

    version: 1
    taints:
      - node: host-a              # or device: host-a/cuda:3
        reason: XID 79 twice in one night
        since: '2026-11-26T08:00:00Z'
        expiry: null              # or a time of the same form
        by: person                # person, preflight, alarm, history
        evidence: {xid: 79}       # or a text

A file that is not understood is an error, and is never overwritten. Of several writers each waits
for a lock, and replaces the file by renaming a complete one: a reader sees it before or after.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.constructor import RoundTripConstructor

from trainchaos.chaos.errors import EXIT_SKIPPED, EXIT_USAGE, ChaosError, NewerVersion
from trainchaos.recovery.transport.atomic_rename import fsync_directory

VERSION = 1
ENVIRONMENT = "CHAOS_TAINTS"
MAX_BYTES = 1_000_000
MAX_TEXT = 2000
MAX_FACTS = 40
LOCK_LIMIT_S = 60.0
"""A writer holds the lock while one small file reaches the disk, which takes seconds on a busy one;
with several waiting, a minute of it means that a holder is stuck.
"""
_LOCK_EVERY_S = 0.01
WHAT_TO_DO = (
    "add healthy nodes or devices, start fewer processes, or 'chaos taint clear' what is repaired"
)
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_DEVICE = re.compile(r"(cuda|cpu):(0|[1-9][0-9]{0,4})")


class TaintError(ChaosError):
    """A taint, or the list of them, is wrong; nothing was changed."""

    exit_code = EXIT_USAGE


class TooFewPlaces(ChaosError):
    """Without the tainted places, the job's processes have no place: nothing was started."""

    exit_code = EXIT_SKIPPED


def _time(given: Any) -> Any:
    """A time as the file has it: ISO 8601 with a zone, and no number. Raises ValueError."""
    if isinstance(given, str):
        with suppress(ValueError):
            given = datetime.fromisoformat(given)
    if not isinstance(given, datetime):
        raise ValueError(f"{given!r} is no time: write 2026-12-01T08:00:00Z")
    if given.tzinfo is None:
        raise ValueError(f"{given.isoformat()} has no time zone: end it with Z, for UTC")
    try:
        return given.astimezone(UTC).replace(microsecond=0)
    except OverflowError:
        raise ValueError(f"{given.isoformat()} is no time of a calendar in UTC") from None


def _line(text: str) -> str:
    if not text.isprintable() or len(text) > MAX_TEXT:
        raise ValueError(f"{text[:40]!r} is not printed, or has more than {MAX_TEXT} characters")
    return text


Time = Annotated[datetime, BeforeValidator(_time)]
Line = Annotated[str, BeforeValidator(lambda given: _line(given) if type(given) is str else given)]


class Taint(BaseModel):
    """A place that is not to be used, and why. Exactly one of ``node`` (name of the host, or the
    number of an emulated node) and ``device`` (``host-a/cuda:3``); ``since``, ``expiry``: UTC,
    whole seconds, None: until it is cleared; ``evidence``: a text, or a few facts by name; ``by``:
    a person, a check before a job, an alarm of a detector, or stored runs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str | None = None
    device: str | None = None
    reason: Line = Field(min_length=1)
    since: Time
    evidence: (
        Line | Annotated[dict[Line, Line | int | float | bool | None], Field(max_length=MAX_FACTS)]
    ) = ""
    expiry: Time | None = None
    by: Literal["person", "preflight", "alarm", "history"]

    @field_validator("node", mode="before")
    @classmethod
    def _is_number(cls, node: Any) -> Any:
        return str(node) if type(node) is int and node >= 0 else node

    @model_validator(mode="after")
    def _is_one_place(self) -> Taint:
        if (self.node is None) == (self.device is None):
            raise ValueError("name either a node or a device")
        _is_place(self.place, device=self.node is None)
        if self.expiry is not None and self.expiry <= self.since:
            ends, begins = written(self.expiry), written(self.since)
            raise ValueError(f"its expiry, {ends}, is not after its beginning, {begins}")
        return self

    @property
    def place(self) -> str:
        """The node, or the device with its host."""
        return self.node or self.device or ""

    def expired(self, now: datetime) -> bool:
        """Whether it no longer holds at ``now`` (with a time zone)."""
        return self.expiry is not None and self.expiry <= now

    def same_as(self, other: Taint) -> bool:
        """Whether both say the same of a place, whenever it was said."""
        return self.model_copy(update={"since": other.since}) == other

    def means(self, names: Collection[str], device: str | None = None) -> bool:
        """Whether it is of a node with these names, or of that ``device`` there (as torch names
        it).
        """
        host, _, its = self.place.partition("/")
        return its in ("", device) and any(same_host(host, name) for name in names)

    def as_data(self) -> dict[str, Any]:
        """As the file has it; times as ``2026-11-26T08:00:00Z``."""
        where = {"node": self.node} if self.node is not None else {"device": self.device}
        return {
            **where,
            "reason": self.reason,
            "since": written(self.since),
            "expiry": None if self.expiry is None else written(self.expiry),
            "by": self.by,
            "evidence": self.evidence,
        }


def written(when: datetime) -> str:
    """A time as the file has it; ``when`` has a time zone."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def made(fields: Mapping[str, Any]) -> Taint:
    """A taint of what a person said. Raises TaintError for what is wrong first."""
    try:
        return Taint.model_validate(fields)
    except ValidationError as error:
        raise TaintError(f"this is no taint: {_wrong(error)[1]}") from error


def of_place(place: str) -> dict[str, str]:
    """The field of a taint for a place that a person wrote: ``host-a``, ``3`` or ``host-a/cuda:3``.
    Raises TaintError.
    """
    try:
        _is_place(place, device="/" in place)
    except ValueError as error:
        raise TaintError(
            f"{place!r} is no place",
            hint="a node is its host's name or its number: host-a; a device: host-a/cuda:3",
        ) from error
    return {"device" if "/" in place else "node": place}


def same_host(one: str, other: str) -> bool:
    """Whether two names mean one host: equal without regard to case (RFC 4343), or one of them is
    the other without its domain. Numbers and addresses have no domain.
    """
    one, other = one.lower(), other.lower()
    (head, dot, _), (head_2, dot_2, _) = one.partition("."), other.partition(".")
    if one == other or head.isdecimal() or head_2.isdecimal():
        return one == other
    return head == head_2 and bool(dot) != bool(dot_2)


def names_of(hosts: Mapping[int, str], *, emulated: bool = False) -> dict[int, tuple[str, ...]]:
    """The names by which a taint may mean each node: that of its host, and its number if the host
    does not tell it from another node. ``emulated``: several nodes of this machine may have names
    of their own, such as containers.
    """
    shared = emulated and len(hosts) > 1
    several = {host for host, count in Counter(hosts.values()).items() if count > 1}
    return {
        node: (host, str(node)) if shared or host in several else (host,)
        for node, host in hosts.items()
    }


def about(taints: Sequence[Taint]) -> list[dict[str, Any]]:
    """Taints as an event's data has them."""
    wanted = ("by", "reason", "since")
    return [
        {"place": each.place, **{key: each.as_data()[key] for key in wanted}} for each in taints
    ]


def listed(taints: Sequence[Taint]) -> str:
    """Taints for people: each place with its reason."""
    return "; ".join(f"{each.place} ({each.reason})" for each in taints)


def taints_now(given: Path | None = None) -> tuple[Taint, ...]:
    """The taints that hold now: of the file ``given``, which then has to exist, or the default one.
    Raises TaintError, NewerVersion.
    """
    known = TaintList(taints_path(given), needed=given is not None)
    return known.active(datetime.now(UTC))


def taints_path(given: Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """Where the list is: ``given`` (an option), else ``$CHAOS_TAINTS``, else ``taints.yaml`` in the
    user's state directory, ``$XDG_STATE_HOME/trainchaos`` or ``~/.local/state/trainchaos`` (XDG
    Base Directory Specification 0.8, which has relative values ignored). ``env``: instead of the
    process's environment.
    """
    known = os.environ if env is None else env
    if given is not None:
        return given
    if known.get(ENVIRONMENT):
        return Path(known[ENVIRONMENT])
    state = known.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "trainchaos" / "taints.yaml"


class TaintList:
    """The list at ``path``. ``needed``: a file that does not exist is an error, not an empty list
    (one that a person named).
    """

    def __init__(self, path: Path, *, needed: bool = False) -> None:
        self.path = path
        self._needed = needed

    def read(self) -> tuple[Taint, ...]:
        """All taints, expired ones too, in the order of the file; none without a file. Raises
        TaintError, NewerVersion.
        """
        return self._parsed(self._text())[0]

    def active(self, now: datetime) -> tuple[Taint, ...]:
        """Those that hold at ``now`` (with a time zone). Raises TaintError, NewerVersion."""
        return tuple(taint for taint in self.read() if not taint.expired(now))

    def add(self, taint: Taint, now: datetime) -> bool:
        """Add a taint. False: the list has one of the same place, reason and origin that holds at
        ``now``. Raises TaintError, also for a taint that has expired by then; NewerVersion.
        """
        if taint.expired(now):
            raise TaintError(
                f"the taint of {taint.place} would have expired before it is added:"
                f" {written(taint.expiry or now)}",
                hint="name a time that is to come, or leave it out: it then holds until cleared",
            )
        with self._changing() as (old, rows):
            if any(each.same_as(taint) and not each.expired(now) for each in old):
                return False
            rows.append({name: said for name, said in taint.as_data().items() if said})
        return True

    def clear(self, place: str) -> tuple[Taint, ...]:
        """Remove all taints of a place, expired or not, and return them. Raises TaintError,
        NewerVersion.
        """
        if not self.path.exists():
            return ()
        with self._changing() as (old, rows):
            for index in reversed([i for i, taint in enumerate(old) if taint.place == place]):
                del rows[index]
        return tuple(taint for taint in old if taint.place == place)

    # ---- the file

    def _text(self) -> str:
        try:
            # Not blocking: opening a named pipe must not wait for its writer.
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as stream:
                if not os.path.isfile(fd):
                    raise TaintError(f"{self.path}: is not a regular file")
                raw = stream.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise TaintError(f"{self.path}: is larger than {MAX_BYTES // 1000} kB")
            return raw.decode("utf-8-sig")
        except FileNotFoundError as error:
            if not self._needed:
                return ""
            raise TaintError(
                f"{self.path}: no such list of taints",
                hint="'chaos taint add' makes one; leave --taints out to use your own",
            ) from error
        except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
            why = getattr(error, "strerror", None) or error
            raise TaintError(f"{self.path}: cannot be read: {why}") from error

    def _parsed(self, text: str) -> tuple[tuple[Taint, ...], Any]:
        """The taints of a text, and its tree, which ``_dumped`` writes."""
        try:
            tree = _yaml().load(text)
        except (YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            said = getattr(error, "problem", None) or type(error).__name__
            raise self._refused(mark.line if mark else 0, f"is not valid YAML: {said}") from error
        if tree is None:
            return (), {"version": VERSION, "taints": []}
        if not isinstance(tree, dict):
            raise self._refused(0, "the list is a mapping with version and taints")
        version = tree.get("version")
        if type(version) is not int or version < 1:
            line = _line_of(tree, ["version"])
            raise self._refused(line, "version: has to be 1 or another whole number")
        if version > VERSION:
            raise NewerVersion(self.path, version, VERSION)
        try:
            return tuple(_File.model_validate(tree).taints or ()), tree
        except ValidationError as error:
            loc, what = _wrong(error)
            number = f"taint {loc[1] + 1}: " if len(loc) > 1 and isinstance(loc[1], int) else ""
            raise self._refused(_line_of(tree, loc), number + what) from error

    def _refused(self, line: int, what: str) -> TaintError:
        return TaintError(
            f"{self.path}:{line + 1}: {what}", hint="correct the file by hand; it was left as it is"
        )

    @contextmanager
    def _changing(self) -> Iterator[tuple[tuple[Taint, ...], list[Any]]]:
        """Read, change and replace the file under the lock: the taints, and the rows to change.
        Comments of a person stay, and JSON stays JSON. A list with as many rows as before is left.
        """
        target = Path(os.path.realpath(self.path))  # renaming would replace a link by a file
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(target):
                text = self._text() if target.exists() else ""
                old, tree = self._parsed(text)
                dumps = _dumped
                with suppress(ValueError):
                    tree, dumps = json.loads(text), _dumped_json
                if tree.get("taints") is None:
                    tree["taints"] = []
                yield old, tree["taints"]
                if len(tree["taints"]) == len(old):
                    return
                new = dumps(tree)
                if len(new.encode()) > MAX_BYTES:
                    raise TaintError(
                        f"{self.path}: would grow beyond {MAX_BYTES // 1000} kB",
                        hint="clear taints that have expired",
                    )
                self._parsed(new)  # what cannot be read again must not be written
                _replace(target, new.encode())
        except OSError as error:
            raise TaintError(
                f"{self.path}: cannot be written: {error.strerror or error}",
                hint=f"choose another file with --taints, or {ENVIRONMENT}",
            ) from error


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int
    taints: list[Taint] | None = None


class _Constructor(RoundTripConstructor):
    """Times stay texts, which the model reads."""


_Constructor.add_constructor(
    "tag:yaml.org,2002:timestamp", lambda loader, node: loader.construct_scalar(node)
)


def _yaml() -> YAML:
    yaml = YAML()
    yaml.Constructor = _Constructor
    yaml.width = 1 << 16
    return yaml


def _dumped(tree: Any) -> str:
    out = io.StringIO()
    _yaml().dump(tree, out)
    return out.getvalue()


def _dumped_json(tree: Any) -> str:
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def _line_of(tree: Any, loc: Sequence[Any]) -> int:
    """The line of what is at a place in a tree, or of the smallest part that is there; from 0."""
    line: int = tree.lc.line
    for key in loc:
        try:
            (line, _), tree = tree.lc.data[key][:2], tree[key]
        except (LookupError, AttributeError, TypeError, ValueError):
            break
    return line


def _wrong(error: ValidationError) -> tuple[Sequence[Any], str]:
    """Where it is that is wrong first, and what is wrong, for people."""
    # A field that is missing is often one that is misspelt: say the latter.
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    said = str(first["msg"]).removeprefix("Value error, ")
    loc = first["loc"]
    path = loc[2:] if loc[:1] == ("taints",) and len(loc) > 1 else loc
    return loc, f"{path[0]}: {said}" if path else said


def _is_place(place: str, *, device: bool) -> None:
    host, _, its = place.partition("/")
    if not device and not _NODE.fullmatch(place):
        raise ValueError(f"{place!r} is no name of a node: host-a, or a number")
    if device and not (_NODE.fullmatch(host) and _DEVICE.fullmatch(its)):
        raise ValueError(f"{place!r} is no device of a node: host-a/cuda:3")


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock file beside a list, which stays there: to remove it would let two in. Raises
    TaintError, OSError.
    """
    path = target.with_name(f"{target.name}.lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until_s = time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TaintError(
                        f"{path} has been locked by another process for {LOCK_LIMIT_S:g} s",
                        hint=f"'fuser {path}' names it",
                    ) from None
                time.sleep(_LOCK_EVERY_S)
        yield
    finally:
        os.close(fd)


def _replace(target: Path, data: bytes) -> None:
    """Put a complete file in the place of another, durably, under the lock. Raises OSError."""
    new = target.with_name(f".{target.name}.new")
    try:
        with open(new, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), target.stat().st_mode & 0o777 if target.exists() else 0o644)
            os.fsync(stream.fileno())
        new.rename(target)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)
