"""Messages between the coordinator of a job and the agents of its nodes.

The agent connects. Both ends prove that they know the run's token
(``recovery.nodes.link.handshake``); every later line carries a running number and a code made with
a key of this one connection, so that forged, replayed or reordered lines are refused. JSON, one
message a line, nothing is unpickled. Times are nanoseconds of the sender's monotonic clock.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from trainchaos.recovery.health.readings.signs import Sign
from trainchaos.recovery.nodes.link.beat_rate import LEAST_S

VERSION = 13
MAX_LINE = 4 << 20


class Frame(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Bundle(Frame):
    """Messages of one kind to or from processes (``recovery.nodes.link.bundle``). ``common``:
    fields that all of them have; ``each``: the process and the further fields of its message.
    """

    common: dict[str, Any]
    each: tuple[tuple[str, dict[str, Any]], ...]


# ---- from the agent


class Hello(Frame):
    """The first message of an agent. ``incarnation``: of the agent's process, new with each;
    ``epoch``: of the highest coordinator that it has obeyed (0: none); ``host``, ``boot``: of the
    machine; ``address``: where its ranks listen; ``devices``: that torch can see there, such as
    ``cuda:0``; ``scratch``: where its processes write; ``processes``: living ones, by name;
    ``versions``: of the software that has to be the same; ``lease_s``: how long it continues
    without a coordinator before it ends everything.
    """

    type: Literal["hello"] = "hello"
    node: int
    incarnation: str
    epoch: int
    host: str
    boot: str
    address: str
    devices: tuple[str, ...] = ()
    scratch: str = ""
    processes: dict[str, int] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    lease_s: float = 120.0


class Started(Frame):
    """The answer to ``Start``. ``error``: why the process could not be started; then ``pid`` is
    0.
    """

    type: Literal["started"] = "started"
    process: str
    pid: int
    error: str = ""


class Heard(Bundle):
    """Processes of the node sent messages, in this order: all of one kind that came in one turn of
    the agent, as far as they fit. When a generation is aborted, all ranks of a node say at once
    that they have left it.
    """

    type: Literal["heard"] = "heard"


class Sinking(Frame):
    """A process will exit in a moment (``recovery.process.local.Dying``)."""

    type: Literal["sinking"] = "sinking"
    process: str


class Stacks(Frame):
    """The answer of a process to ``recovery.process.stacks.STACK_SIGNAL``."""

    type: Literal["stacks"] = "stacks"
    process: str
    text: str


MarkWords = tuple[int, int, int, int, int, int, int, int]
"""The fields of ``recovery.transport.progress_counters.Mark`` in their order, the phase as its
index.
"""


class Ended(Frame):
    """A process is reaped; all its lines came before. ``mark``: its last one; ``time_ns``: when it
    was noticed.
    """

    type: Literal["ended"] = "ended"
    process: str
    exit_code: int | None
    signal: int | None
    time_ns: int
    mark: MarkWords


class Beat(Frame):
    """The node's heartbeat: changes since the last one over this connection. ``marks``: by process;
    ``states``: process -> the kernel's letter; ``pulses``: of silent processes, in each beat
    (``recovery.process.starvation.Pulse``).
    """

    type: Literal["beat"] = "beat"
    time_ns: int
    marks: dict[str, MarkWords]
    states: dict[str, str]
    pulses: dict[str, tuple[float, bool]] = Field(default_factory=dict)


class Pressed(Frame):
    """How short of CPU the node and its ranks are, sent periodically
    (``recovery.process.pressure``).
    """

    type: Literal["pressed"] = "pressed"
    time_ns: int
    cpus: int = Field(ge=1)
    some_s: float | None
    steal_s: float | None
    ranks: dict[str, tuple[float, float]]


class Lines(Frame):
    """Bytes of a file of a process, whole lines for event logs. ``file``: relative to the node's
    scratch directory there and to the run's directory here; ``offset``: of the first byte, so that
    bytes already present are written only once; ``text``: one character per byte.
    """

    type: Literal["lines"] = "lines"
    file: str
    offset: int = Field(ge=0)
    text: str


class Pong(Frame):
    """The answer to ``Ping``: its ``sent_ns``, and when it was received and answered here."""

    type: Literal["pong"] = "pong"
    sent_ns: int
    received_ns: int
    answered_ns: int


class Cleared(Frame):
    """The answer to ``Clear``: every process of the arm has ended but those ``left`` (pid ->
    name).
    """

    type: Literal["cleared"] = "cleared"
    left: dict[int, str] = Field(default_factory=dict)


class Warned(Frame):
    """The node has notice that it will be ended soon (SIGTERM), and has passed it to its ranks."""

    type: Literal["warned"] = "warned"


class Found(Frame):
    """What the node's health service found (``recovery.health.service``); whose node a sign names
    does not count, nor whose rank.
    """

    type: Literal["found"] = "found"
    signs: tuple[Sign, ...]


class Checked(Frame):
    """The answer to ``Check`` (``recovery.health.care.place_check.Answer``)."""

    type: Literal["checked"] = "checked"
    device: str
    fit: bool | None
    said: str


# ---- from the coordinator


class Welcome(Frame):
    """The answer to ``Hello``. ``epoch``: of this coordinator, not lower than any before;
    ``coordinator``: its identity: for another one than before, the agent numbers its messages anew;
    ``beat_s``: seconds between two of its reports with changes; ``ping_s``: within which it is
    pinged (``recovery.nodes.link.beat_rate``).
    """

    type: Literal["welcome"] = "welcome"
    epoch: int
    coordinator: str
    beat_s: float = Field(default=LEAST_S, ge=LEAST_S, le=60.0)
    ping_s: float = Field(default=1.0, ge=1.0, le=600.0)


class Fence(Frame):
    """The node was given up: kill everything and begin anew, as another agent. This message ends
    the connection.
    """

    type: Literal["fence"] = "fence"


class Refused(Frame):
    """The answer to ``Hello`` where the agent cannot be admitted now, and why; it may dial again.
    This message ends the connection.
    """

    type: Literal["refused"] = "refused"
    why: str


class Start(Frame):
    """Start a process. ``config``: JSON for its entry, in which the agent only sets ``parent`` to
    its own pid; ``log``: its event log, as in ``Lines.file``, "" for none.
    """

    type: Literal["start"] = "start"
    process: str
    mode: Literal["warm", "cold"]
    config: str
    log: str = ""


class Tell(Bundle):
    """Pass messages to processes, in this order."""

    type: Literal["tell"] = "tell"


class Signal(Frame):
    """Signal a process through its held pidfd."""

    type: Literal["signal"] = "signal"
    process: str
    signum: int


class Ping(Frame):
    """A query for the offset of the node's clock."""

    type: Literal["ping"] = "ping"
    sent_ns: int


class Check(Frame):
    """Find out whether a device of the node is fit, ``cpu`` for its processors; answered by
    ``Checked``, unless ``Clear`` comes first.
    """

    type: Literal["check"] = "check"
    device: str = Field(pattern=r"^(cpu|(cpu|cuda):\d{1,5})$")


class Clear(Frame):
    """The arm is over: kill and reap everything, forget its files; answered by ``Cleared``."""

    type: Literal["clear"] = "clear"


class Bye(Frame):
    """The run is over: kill everything and end."""

    type: Literal["bye"] = "bye"


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

FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(Annotated[FromAgent, Field(discriminator="type")])
FROM_COORDINATOR: TypeAdapter[FromCoordinator] = TypeAdapter(
    Annotated[FromCoordinator, Field(discriminator="type")]
)
