"""What a coordinator knows about one node and its processes. Sockets are touched only through
``Link``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.health.signs import Sign
from trainchaos.recovery.nodes.coordinator.loss import How
from trainchaos.recovery.nodes.link.clock import ClockWatch, Offset
from trainchaos.recovery.nodes.link.link import Link, Post
from trainchaos.recovery.nodes.link.protocol import Hello, Pong, Pressed
from trainchaos.recovery.process.host import Dying, Exited, MessageReceived
from trainchaos.recovery.process.pressure import PressureReading
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.progress_counters import NEVER, Mark
from trainchaos.recovery.transport.stream import MessageError

MAX_KEPT = 20_000  # messages that wait for one agent
_ANY_NS = 1 << 62


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One node. ``connected``: its agent is connected now; ``silent_s``: for how long this process
    listened and received nothing; ``lost``: why it was given up, "" while it is not; ``offset_ns``,
    ``bound_ns``: its monotonic clock minus ours, and how far that can be off (None: not measured
    yet); the rest as its agent reported.
    """

    node: int
    host: str
    boot: str
    address: str
    devices: tuple[str, ...]
    scratch: str
    incarnation: str
    versions: dict[str, str]
    connected: bool
    silent_s: float
    lost: str
    offset_ns: int | None
    bound_ns: int | None


@dataclass(frozen=True, kw_only=True)
class NodeJoined:
    """An agent has connected for a node: the first, or another one than before."""

    node: int
    info: NodeInfo


@dataclass(frozen=True, kw_only=True)
class NodeLost:
    """A node was given up; the exits of its processes follow. ``taken_away``: its agent was seen to
    have ended (``recovery.nodes.coordinator.loss.TakenAway``).
    """

    node: int
    why: str
    taken_away: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeWarned:
    """A node has notice that it will be ended soon, and has passed it to its ranks."""

    node: int


@dataclass(frozen=True, kw_only=True)
class NodeFound:
    """A node's health service found something there. ``sign.device``: as torch names it on the
    node.
    """

    node: int
    sign: Sign


@dataclass(frozen=True, kw_only=True)
class NodeChecked:
    """A node's agent has found out whether a device, as torch names it there, is fit
    (``recovery.health.checks.Answer``).
    """

    node: int
    device: str
    fit: bool | None
    said: str


@dataclass(frozen=True, kw_only=True)
class ClockMeasured:
    """Offset of a node's monotonic clock, as in ``NodeInfo``."""

    node: int
    offset_ns: int
    bound_ns: int


@dataclass(frozen=True, kw_only=True)
class NotKept:
    """The local disk did not take ``bytes`` that an agent sent of a file, and nothing later of that
    file will be kept: it remains a prefix of what its process wrote.
    """

    file: str
    bytes: int
    why: str


NodeEvent = NodeJoined | NodeLost | NodeWarned | NodeFound | NodeChecked | ClockMeasured | NotKept
FleetReport = MessageReceived | Dying | Exited | NodeEvent


class NodeGone(InfrastructureError):
    """The node is lost, or does not answer now."""

    def __init__(self, node: int, why: str) -> None:
        super().__init__(f"node {node}: {why}", hint="use another node")
        self.node = node
        self.why = why


@dataclass(kw_only=True)
class RemoteProcess:
    """One process of a node. ``state``: the kernel's letter; ``pulse``: how much CPU time it got;
    ``pid`` 0: it is being started; ``error``: why it was not; ``reported_dying``: a
    ``Dying`` was reported; ``stacks``: written since it was asked, None: it never was.
    """

    name: str
    node: int
    pid: int = 0
    error: str = ""
    mark: Mark = NEVER
    state: str = "R"
    pulse: Pulse = field(default_factory=Pulse)
    reported_dying: bool = False
    stacks: str | None = None


@dataclass(kw_only=True)
class NodeState:
    """One node's agent. Times in nanoseconds of our clock; ``silent_ns``: since when nothing came;
    ``beat_ns``: when its marks came last; ``pressed``: its newest reading of CPU pressure, and when
    that was made; ``left_ns``: since when it is not connected (0: it is), ``how`` that connection
    ended and the ``pace`` of the other nodes then; ``asked``: a process was to be started on it
    while it was silent; ``wanted_ns``: since when the job waits for it; ``on_hang_up``: called
    before its connection is closed.
    """

    node: int
    hello: Hello
    link: Link | None = None
    post: Post = field(default_factory=lambda: Post(limit=MAX_KEPT))
    clock: ClockWatch = field(default_factory=ClockWatch)
    silent_ns: int = 0
    beat_ns: int = 0
    pressed: tuple[int, PressureReading] | None = None
    left_ns: int = 0
    how: How = ""
    pace: int = 0
    asked: bool = False
    wanted_ns: int = 0
    reported_dying: bool = False
    lost: str = ""
    ping_due_ns: int = 0
    pings: int = 0
    cleared: dict[int, str] | None = None
    on_hang_up: Callable[[], None] | None = None

    def info(self, now_ns: int, *, heard_ns: int) -> NodeInfo:
        """The public view of this node. ``heard_ns``: when this process listened last."""
        hello, offset = self.hello, self.clock.offset(now_ns)
        return NodeInfo(
            node=self.node,
            host=hello.host,
            boot=hello.boot,
            address=hello.address,
            devices=hello.devices,
            scratch=hello.scratch,
            incarnation=hello.incarnation,
            versions=dict(hello.versions),
            connected=self.link is not None,
            silent_s=max(0, heard_ns - self.silent_ns) / 1e9,
            lost=self.lost,
            offset_ns=offset.offset_ns if offset else None,
            bound_ns=offset.bound_ns if offset else None,
        )

    def ours_ns(self, theirs_ns: int, now_ns: int, boot: str) -> int:
        """Convert a time of the node to our clock; ``boot``: of our machine, which may be the
        node's as well.
        """
        offset: Offset | None = self.clock.offset(now_ns) if self.hello.boot != boot else None
        return theirs_ns - offset.offset_ns if offset is not None and theirs_ns else theirs_ns

    def marks(self, marks: Iterable[Mark], now_ns: int, boot: str) -> Iterator[Mark]:
        """Progress marks, their times on our clock."""
        # once for all of them: the clock's offset is the best of many measurements
        behind_ns = _ANY_NS - self.ours_ns(_ANY_NS, now_ns, boot)
        for mark in marks:
            its_ns = mark.time_ns
            yield mark._replace(time_ns=its_ns - behind_ns) if behind_ns and its_ns else mark

    def answered(self, pong: Pong, now_ns: int, *, told: bool) -> Offset | None:
        """Its agent has answered a ping: what is new of its clock, and is to be reported. ``told``:
        whether anything may be.
        """
        sent_ns, received_ns, answered_ns = pong.sent_ns, pong.received_ns, pong.answered_ns
        self.clock.answered(
            sent_ns=sent_ns, received_ns=received_ns, answered_ns=answered_ns, back_ns=now_ns
        )
        return self.clock.changed(now_ns) if told else None

    def feels(self, pressed: Pressed, now_ns: int, boot: str) -> None:
        """Its agent has reported how short of CPU it is; unread as long as its clock is unknown.
        Raises MessageError.
        """
        if pressed.reading.cpus < 1:
            raise MessageError("a machine without processors")
        if self.hello.boot == boot or self.clock.offset(now_ns) is not None:
            self.pressed = self.ours_ns(pressed.time_ns, now_ns, boot), pressed.reading

    def want(self, now_ns: int) -> None:
        """Note that the job cannot continue without it."""
        if not self.wanted:
            self.wanted_ns = now_ns

    @property
    def wanted(self) -> bool:
        """Whether the job waits for it."""
        return self.asked or self.post.waits

    def hang_up(self) -> None:
        """Close its connection."""
        if self.link is not None:
            if self.on_hang_up is not None:
                self.on_hang_up()
            self.link.close()
            self.link = None
