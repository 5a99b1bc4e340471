"""Messages between the coordinator of a job and the agents of its nodes.

The agent connects. Both ends prove that they know the run's token
(``recovery.nodes.link.handshake``); every later message carries a code made with a key of this one
connection over it and its number, so that forged, replayed or reordered ones are refused. Times are
nanoseconds of the sender's monotonic clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import Meta, field

from trainchaos.recovery.health.signs import HealthAlarm, HealthReport, Sign
from trainchaos.recovery.nodes.link.beat_rate import LEAST_S
from trainchaos.recovery.process.pressure import PressureReading
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.stream import Message, Record, encoded, parser
from trainchaos.recovery.transport.wire import ANY_MESSAGE

VERSION = 15
LONGEST = 4 << 20  # bytes of a message
TOGETHER = 1 << 20  # bytes of messages of processes in one message, unless one alone has more
_T = TypeVar("_T")
_DEVICE = re.compile(r"cpu|(cpu|cuda):\d{1,5}")


class Letters(Message):
    """Messages to or from processes, in this order: the process, and its message as it is passed
    on (``recovery.transport.wire``).
    """

    each: tuple[tuple[str, msgspec.Raw], ...]

    @classmethod
    def of(cls, letters: Iterable[tuple[str, Message]]) -> Iterator[Self]:
        """As few as TOGETHER allows. A message to many in a row is encoded once."""
        each: list[tuple[str, msgspec.Raw]] = []
        size, last, raw = 0, None, msgspec.Raw()
        for process, message in letters:
            if message is not last:
                last, raw = message, msgspec.Raw(encoded(message))
            length = memoryview(raw).nbytes
            if each and size + length > TOGETHER:
                yield cls(each=tuple(each))
                each, size = [], 0
            each.append((process, raw))
            size += length
        if each:
            yield cls(each=tuple(each))

    def messages(self) -> list[tuple[str, Message]]:
        """Process and message of each. Raises MessageError."""
        return [(process, ANY_MESSAGE(raw)) for process, raw in self.each]


# ---- from the agent


class Hello(Message):
    """The first message of an agent. ``incarnation``: of the agent's process, new with each;
    ``epoch``: of the highest coordinator that it has obeyed (0: none); ``host``, ``boot``: of the
    machine; ``address``: where its ranks listen; ``devices``: that torch can see there, such as
    ``cuda:0``; ``scratch``: where its processes write; ``processes``: living ones, by name;
    ``versions``: of the software that has to be the same; ``lease_s``: how long it continues
    without a coordinator before it ends everything.
    """

    node: int
    incarnation: str
    epoch: int
    host: str
    boot: str
    address: str
    devices: tuple[str, ...] = ()
    scratch: str = ""
    processes: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    lease_s: float = 120.0


class Started(Message):
    """The answer to ``Start``. ``error``: why the process could not be started; then ``pid`` is
    0.
    """

    process: str
    pid: int
    error: str = ""


class Heard(Letters):
    """Processes of the node sent messages, in this order: all of one kind that came in one turn of
    the agent, as far as they fit. When a generation is aborted, all ranks of a node say at once
    that they have left it.
    """


class Sinking(Message):
    """A process will exit in a moment (``recovery.process.local.Dying``)."""

    process: str


class Stacks(Message):
    """The answer of a process to ``recovery.process.stacks.STACK_SIGNAL``."""

    process: str
    text: str


class Ended(Message):
    """A process is reaped; all its lines came before. ``mark``: its last one; ``time_ns``: when it
    was noticed.
    """

    process: str
    exit_code: int | None
    signal: int | None
    time_ns: int
    mark: Mark


class Beat(Message):
    """The node's heartbeat: changes since the last one over this connection. ``marks``: by process;
    ``states``: process -> the kernel's letter; ``pulses``: of silent processes, in each beat
    (``recovery.process.starvation.Pulse``).
    """

    time_ns: int
    marks: dict[str, Mark]
    states: dict[str, str]
    pulses: dict[str, tuple[float, bool]] = field(default_factory=dict)


class Pressed(Message):
    """How short of CPU the node and its ranks are, sent periodically."""

    time_ns: int
    reading: PressureReading


class Lines(Message):
    """Bytes of a file of a process, whole lines for event logs. ``file``: relative to the node's
    scratch directory there and to the run's directory here; ``offset``: of the first byte, so that
    bytes already present are written only once; ``text``: one character per byte.
    """

    file: str
    offset: Annotated[int, Meta(ge=0)]
    text: str


class Pong(Message):
    """The answer to ``Ping``: its ``sent_ns``, and when it was received and answered here."""

    sent_ns: int
    received_ns: int
    answered_ns: int


class Cleared(Message):
    """The answer to ``Clear``: every process of the arm has ended but those ``left`` (pid ->
    name).
    """

    left: dict[int, str] = field(default_factory=dict)


class Warned(Message):
    """The node has notice that it will be ended soon (SIGTERM), and has passed it to its ranks."""


class Found(Message):
    """What the node's health service found (``recovery.health.service``); whose node a sign names
    does not count, nor whose rank.
    """

    reports: tuple[HealthReport, ...] = ()
    alarms: tuple[HealthAlarm, ...] = ()

    @classmethod
    def of(cls, signs: Iterable[Sign]) -> Self:
        """Signs of either kind."""
        signs = tuple(signs)
        return cls(
            reports=tuple(sign for sign in signs if isinstance(sign, HealthReport)),
            alarms=tuple(sign for sign in signs if isinstance(sign, HealthAlarm)),
        )


class Checked(Message):
    """The answer to ``Check`` (``recovery.health.checks.Answer``)."""

    device: str
    fit: bool | None
    said: str


# ---- from the coordinator


class Welcome(Message):
    """The answer to ``Hello``. ``epoch``: of this coordinator, not lower than any before;
    ``coordinator``: its identity: for another one than before, the agent numbers its messages anew;
    ``beat_s``: seconds between two of its reports with changes; ``ping_s``: within which it is
    pinged (``recovery.nodes.link.beat_rate``).
    """

    epoch: int
    coordinator: str
    beat_s: Annotated[float, Meta(ge=LEAST_S, le=60.0)] = LEAST_S
    ping_s: Annotated[float, Meta(ge=1.0, le=600.0)] = 1.0


class Fence(Message):
    """The node was given up: kill everything and begin anew, as another agent. This message ends
    the connection.
    """


class Refused(Message):
    """The answer to ``Hello`` where the agent cannot be admitted now, and why; it may dial again.
    This message ends the connection.
    """

    why: str


class Start(Message):
    """Start a process. ``config``: JSON for its entry, in which the agent only sets ``parent`` to
    its own pid; ``log``: its event log, as in ``Lines.file``, "" for none.
    """

    process: str
    mode: Literal["warm", "cold"]
    config: str
    log: str = ""


class Tell(Letters):
    """Pass messages to processes, in this order."""


class Signal(Message):
    """Signal a process through its held pidfd."""

    process: str
    signum: int


class Ping(Message):
    """A query for the offset of the node's clock."""

    sent_ns: int


class Check(Message):
    """Find out whether a device of the node is fit, ``cpu`` for its processors; answered by
    ``Checked``, unless ``Clear`` comes first.
    """

    device: str

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):  # also where one is made: no agent is sent another
            raise ValueError(f"no device: {self.device!r}")


class Clear(Message):
    """The arm is over: kill and reap everything, forget its files; answered by ``Cleared``."""


class Bye(Message):
    """The run is over: kill everything and end."""


FromAgent = (
    Hello
    | Started
    | Heard
    | Sinking
    | Stacks
    | Ended
    | Beat
    | Pressed
    | Lines
    | Pong
    | Cleared
    | Warned
    | Found
    | Checked
)
FromCoordinator = Welcome | Fence | Refused | Start | Tell | Signal | Ping | Check | Clear | Bye


class Parcel(Record, Generic[_T], array_like=True):
    """A message with its ``number`` in the sender's post (0: it may be lost), and the number
    ``got`` of the last message of ours that the sender has.
    """

    number: int
    got: int
    frame: _T


FROM_AGENT = parser(Parcel[FromAgent])
FROM_COORDINATOR = parser(Parcel[FromCoordinator])
