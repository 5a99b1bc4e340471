"""What NCCL's RAS says of a job's communicators: who is dead, who does not answer, and who has
launched fewer collectives than the others.

Each NCCL process (2.24 and newer) has a thread that knows the others by keep-alive messages, and
all of a machine listen at ``NCCL_RAS_ADDR``. The client's protocol and the JSON answer (2.28.7 and
newer) are those of NCCL's src/ras/client_support.cc and client.cc, the text answer too
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainchaos.chaos.errors import ChaosError

LIMIT_S = 7.0  # of one request, all of it
COLLECT_S = 3  # that RAS waits for processes that do not answer it, whole; it may take longer
GREET_S = 0.25  # a process answers at once, if it is not stopped
TRIES = 6  # connections: each may land at a stopped process, as all listen at one port
MOST_BYTES = 32 << 20  # of an answer: a communicator of 4,096 ranks has about 3 MB
MOST_LINE = 1000  # bytes of an answer to a setting
COLLECTIVES = frozenset(
    {
        "AllGather",
        "AllReduce",
        "AlltoAll",
        "Broadcast",
        "Gather",
        "Reduce",
        "ReduceScatter",
        "Scatter",
    }
)
"""Operations that each rank of a communicator launches; of others, such as ``Send``, ranks have
different counts by right.
"""


class RasError(ChaosError):
    """RAS did not answer, or not in a form that is known here."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A process without data. ``rank``: in its largest communicator, None where only the process is
    named; ``pid``: -1 where RAS does not know it; ``dead``: given up, after 60 s and more.
    """

    rank: int | None
    pid: int
    host: str
    dead: bool

    def __str__(self) -> str:
        who = _who(self.rank, self.pid, self.host)
        if self.dead:
            return f"{who} is considered dead (unreachable via the RAS network)"
        return f"{who} does not answer NCCL's RAS"


@dataclass(frozen=True, kw_only=True)
class Behind:
    """A rank that has launched ``collective`` only ``count`` times, and another ``others`` times.
    NCCL before 2.26 counts all collectives together: ``collective``.
    """

    rank: int
    pid: int
    host: str
    communicator: str
    collective: str
    count: int
    others: int

    @property
    def awaited(self) -> str:
        """The first that it has not launched, such as ``AllReduce 41``; they count from 1."""
        return f"{self.collective} {self.count + 1}"

    def __str__(self) -> str:
        who = _who(self.rank, self.pid, self.host)
        return (
            f"{who} lags: it has launched {self.collective} {self.count} times, others"
            f" {self.others}, in communicator {self.communicator}"
        )


@dataclass(frozen=True, kw_only=True)
class RasFinding:
    """What one answer says. ``communicators``: how many there are; ``unsure``: ranks also exchange
    between two, or it is unknown whether they do: one that lags may be kept by another.

    A rank of a running job is often behind by one for a moment; one that hangs stays behind.
    """

    communicators: int
    missing: tuple[Missing, ...] = ()
    behind: tuple[Behind, ...] = ()
    unsure: bool = False

    @property
    def sentences(self) -> list[str]:
        """For people, the gravest first."""
        missing = sorted(self.missing, key=lambda one: not one.dead)
        return [*map(str, missing), *map(str, self.behind)]

    def of(self, pids: Mapping[int, str]) -> RasFinding:
        """What it says of these processes of this machine; others are another job's, or gone."""
        return replace(
            self,
            missing=tuple(one for one in self.missing if one.pid in pids),
            behind=tuple(one for one in self.behind if one.pid in pids),
        )

    def about(self, pid: int) -> tuple[Missing | Behind, ...]:
        """What it says of one process."""
        every: tuple[Missing | Behind, ...] = (*self.missing, *self.behind)
        return tuple(one for one in every if one.pid == pid)

    @property
    def culprit(self) -> int | None:
        """The pid of the one process that others wait for: the only one that is missing, or else
        the only one that is behind. None: there is none, or several, or it cannot be told.
        """
        if self.missing:
            pids = {one.pid for one in self.missing}
        else:
            pids = set() if self.unsure else {one.pid for one in self.behind}
        return next(iter(pids)) if len(pids) == 1 and -1 not in pids else None


def ask(address: str, *, limit_s: float = LIMIT_S) -> RasFinding:
    """Ask the RAS of a job for the state of its communicators. ``address``: ``host:port``;
    ``limit_s``: seconds in all, not counting the look-up of a host's name.

    Raises RasError where nobody listens or answers in time, where NCCL is older than 2.28.7, or
    where the answer is longer than MOST_BYTES or of another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise RasError(f"{address!r} is no address of RAS", hint="host:port, as 127.0.0.1:28028")
    end_s = time.monotonic() + limit_s
    try:
        for _ in range(TRIES):
            left_s = max(GREET_S, end_s - time.monotonic())
            with socket.create_connection((host.strip("[]"), int(port)), left_s) as connection:
                asking = _Asking(connection, end_s)
                if asking.greets():
                    return read_json(asking.status())
    except OSError as error:
        raise RasError(f"no answer of NCCL's RAS at {address}: {error}") from error
    raise RasError(f"no process answers as NCCL's RAS at {address}")


class _Asking:
    """One connection."""

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self._connection = connection
        self._end_s = end_s
        self._read = bytearray()

    def greets(self) -> bool:
        """Whether a process is there that runs. Raises OSError, RasError."""
        end_s, self._end_s = self._end_s, min(self._end_s, time.monotonic() + GREET_S)
        with suppress(TimeoutError):
            said = self._answer("CLIENT PROTOCOL 2")
            if not said.startswith("SERVER PROTOCOL "):
                raise RasError("who answers there is not NCCL's RAS")
            self._end_s = end_s
            return True
        return False

    def status(self) -> bytearray:
        """The state of all communicators, as JSON. Raises OSError, RasError."""
        for setting in (f"TIMEOUT {COLLECT_S}", "SET FORMAT json"):
            if (said := self._answer(setting)) != "OK":
                raise RasError(
                    f"NCCL's RAS refuses {setting!r}: {said[:80]!r}",
                    hint="NCCL 2.28.7 and newer answer in JSON",
                )
        self._send("VERBOSE STATUS")
        while self._more():
            if len(self._read) > MOST_BYTES:
                raise RasError(f"the answer of NCCL's RAS is longer than {MOST_BYTES} bytes")
        return self._read

    def _answer(self, line: str) -> str:
        self._send(line)
        while b"\n" not in self._read:
            if len(self._read) > MOST_LINE or not self._more():
                raise RasError("who answers there is not NCCL's RAS")
        end = self._read.index(b"\n")
        said = self._read[:end].decode(errors="replace").strip()
        del self._read[: end + 1]
        return said

    def _send(self, line: str) -> None:
        self._limit()
        self._connection.sendall(f"{line}\n".encode())

    def _more(self) -> bool:
        self._limit()
        read = self._connection.recv(1 << 16)
        self._read += read
        return bool(read)

    def _limit(self) -> None:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)


# ---- the JSON answer

_Name = Annotated[str, Field(pattern="^[A-Za-z0-9_.:%-]*$", max_length=255)]


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _RankStatus(_Read):
    finalize_called: bool
    destroy_flag: bool
    abort_flag: bool


class _Rank(_Read):
    rank: Annotated[int, Field(ge=0)]
    host: _Name
    pid: int
    status: _RankStatus
    collective_counts: dict[_Name, Annotated[int, Field(ge=0)]]


class _MissingStatus(_Read):
    unresponsive: bool
    considered_dead: bool


class _MissingRank(_Read):
    rank: Annotated[int, Field(ge=0)]
    host: _Name
    pid: int
    status: _MissingStatus


class _Communicator(_Read):
    hash: _Name
    size: int
    ranks: list[_Rank]
    missing_ranks: list[_MissingRank]


class _Document(_Read):
    nccl_version: str
    communicators: list[_Communicator]


def read_json(text: bytes | bytearray | str) -> RasFinding:
    """What a JSON answer says (``ncclras -f json -v``). Keys that are not known here are passed
    over. Raises RasError if it has not the form that NCCL writes.

    Of a communicator that some rank leaves or aborts, counts say nothing.
    """
    try:
        found = _Document.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise RasError(f"no answer of NCCL's RAS: {where}: {first['msg'][:200]}") from None
    missing: dict[tuple[int, str], Missing] = {}
    for communicator in sorted(found.communicators, key=lambda one: -one.size):
        for one in communicator.missing_ranks:
            dead = one.status.considered_dead
            if dead or one.status.unresponsive:
                missing.setdefault(
                    (one.pid, one.host),
                    Missing(rank=one.rank, pid=one.pid, host=one.host, dead=dead),
                )
    used = [one for one in found.communicators if not _left(one)]
    return RasFinding(
        communicators=len(found.communicators),
        missing=tuple(missing.values()),
        behind=tuple(one for communicator in used for one in _behind(communicator)),
        unsure=any(
            count and name not in COLLECTIVES
            for communicator in used
            for rank in communicator.ranks
            for name, count in rank.collective_counts.items()
        ),
    )


def _left(communicator: _Communicator) -> bool:
    states = [rank.status for rank in communicator.ranks]
    return any(one.finalize_called or one.destroy_flag or one.abort_flag for one in states)


def _behind(communicator: _Communicator) -> Iterator[Behind]:
    for name in sorted(COLLECTIVES):
        counts = [rank.collective_counts.get(name, 0) for rank in communicator.ranks]
        most = max(counts, default=0)
        for rank, count in zip(communicator.ranks, counts, strict=True):
            if count < most:
                yield Behind(
                    rank=rank.rank,
                    pid=rank.pid,
                    host=rank.host,
                    communicator=communicator.hash,
                    collective=name,
                    count=count,
                    others=most,
                )


def _who(rank: int | None, pid: int, host: str) -> str:
    process = f"process {pid} on {host}" if pid >= 0 else "of an unknown process"
    return process if rank is None else f"rank {rank} ({process})"
