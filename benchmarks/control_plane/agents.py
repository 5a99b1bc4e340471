"""A simulated node agent.

The agent speaks the real protocol with the product's own messages, seals, framing and reliable
delivery (``recovery.nodes.link``), and follows ``recovery.nodes.agent`` in when it dials, what it
answers and when it gives a connection up. Simulated are the processes below it: a rank is a name, a
pid and a progress mark, and answers orders at once. All times are of the monotonic clock.
"""

from __future__ import annotations

import functools
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trainchaos.recovery.nodes.agent.agent import MAX_KEPT, SILENT_PINGS
from trainchaos.recovery.nodes.agent.dialer import CONNECT_LIMIT_S, LATEST_S, SOONEST_S
from trainchaos.recovery.nodes.coordinator.software import versions
from trainchaos.recovery.nodes.link import handshake, protocol
from trainchaos.recovery.nodes.link.link import Link, Post
from trainchaos.recovery.transport.auth import AuthenticationFailed
from trainchaos.recovery.transport.progress_counters import NEVER, Mark
from trainchaos.recovery.transport.stream import MessageError
from trainchaos.recovery.transport.wire import (
    Abort,
    CheckpointNote,
    Inquiry,
    Join,
    Joined,
    Message,
    Parked,
    PauseRequest,
    Ready,
    Status,
    Stop,
)

STEPS, SAMPLES, BATCH, SEED = 1_000_000, 1 << 20, 1 << 14, 1
FORWARD, COLLECTIVE = "forward", "collective"
FIRST_PID = 1000
SAVE_EVERY = 20  # steps between two checkpoints, which rank 0 reports


# Made once for all ranks that say the same: a real one makes its own, on its own processor.
_parked = functools.lru_cache(maxsize=8)(Parked)
_joined = functools.lru_cache(maxsize=8)(Joined)


class SimulatedAgent:
    """The agent of one node with ``ranks`` places. ``wait``: waits until a descriptor is readable,
    for so many seconds at most; ``pause``: waits so long; ``traffic``: counts for all agents.
    """

    def __init__(
        self,
        node: int,
        job: SimulatedJob,
        *,
        address: tuple[str, int],
        token: bytes,
        wait: Callable[[int, float], object],
        pause: Callable[[float], object],
        traffic: Counted,
        beat_s: float = 1.0,
    ) -> None:
        self.node, self._job = node, job
        self.address, self.token = address, token
        self._wait, self._pause, self._traffic = wait, pause, traffic
        self._beat_s = beat_s
        self._incarnation = secrets.token_hex(8)
        self._post = Post(limit=MAX_KEPT)
        self._versions = dict(versions())
        self.link: Link | None = None
        self.welcome = self.ended = False
        self.epoch, self._ping_s = 0, 1.0
        self._coordinator = ""
        self.processes: dict[str, int] = {}
        self._generation: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._heard: list[tuple[str, Message]] = []
        self._next_pid = FIRST_PID
        self._heard_s = self._beat_due_s = 0.0
        self.fenced = 0
        self.refused: list[str] = []
        self.slow_s = 0.0
        self.deaf_until_s = 0.0

    # ---- the connection

    def dial(self) -> Iterator[str]:
        """Dial until a connection is authenticated and ``Hello`` is sent, with the pauses of the
        real dialer; yields why each attempt failed. Stops when ``ended``.
        """
        pause_s = SOONEST_S
        while not self.ended:
            started_s = time.monotonic()
            try:
                self._connect()
                return
            except (AuthenticationFailed, OSError) as error:
                yield str(error) or type(error).__name__
            self._pause(max(0.0, started_s + pause_s - time.monotonic()))
            pause_s = min(LATEST_S, pause_s * 2)

    def _connect(self) -> None:
        # Not by socket.create_connection: it asks for the address's name even where that is a
        # number, in gevent's ten threads, which hardly run while thousands of agents speak.
        sock = socket.socket(socket.AF_INET)
        try:
            sock.settimeout(CONNECT_LIMIT_S)
            sock.connect(self.address)
            key = handshake.enter(sock, self.token, node=self.node)
            self.link = Link(sock, key, agent=True)
        except BaseException:
            sock.close()
            raise
        self._heard_s = time.monotonic()
        hello = protocol.Hello(
            node=self.node,
            incarnation=self._incarnation,
            epoch=self.epoch,
            host=f"node-{self.node}",
            boot=f"boot of node {self.node}",  # as with machines: its clock has to be measured
            address=self.link.address,
            processes=dict(self.processes),
            versions=self._versions,
        )
        self._put(hello)
        self.link.flush()

    def serve(self, until_s: float) -> None:
        """Obey and report until then, until the connection ends or the run is over, or until the
        coordinator lets it in.
        """
        waits = not self.welcome
        while not self.ended and self.link is not None:
            now_s = time.monotonic()
            if now_s < self.deaf_until_s:
                self._pause(self.deaf_until_s - now_s)
                if time.monotonic() - self._heard_s > SILENT_PINGS * self._ping_s:
                    self.lose()
                    return
            self._beat()
            self._send()
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self.link is None:
                return
            self._wait(self.link.fileno(), left_s)
            if time.monotonic() < self.deaf_until_s:
                continue
            if self.slow_s:
                self._pause(self.slow_s)
            self._obey()
            if waits and self.welcome:
                return

    def lose(self) -> None:
        """Hang up, as an agent that lives does: by a reset; the kernel closes the connection of one
        whose processes are killed in order.
        """
        if self.link is not None:
            self._count_bytes()
            self.link.close() if self.ended else self.link.reset()
            self.link, self.welcome = None, False

    def die(self) -> None:
        """The machine's processes are killed."""
        self.ended = True
        self.lose()

    def say(self, process: str, message: Parked | Joined | CheckpointNote) -> None:
        """A rank sends a message, at once if the agent is connected."""
        self._heard.append((process, message))
        self._pass_on()
        if time.monotonic() >= self.deaf_until_s:
            self._send()

    def put_raw(self, frame: Message) -> None:
        """Send a frame as it is, whatever it claims."""
        self._put(frame)
        self._send()

    def _put(self, frame: Message) -> None:
        if self.link is not None:
            self.link.put(frame, got=self._post.received)
            self._traffic.messages_out += 1

    def _send(self) -> None:
        if self.link is None:
            return
        if self.welcome:
            before = self._post.unsent
            self._post.pump(self.link)
            self._traffic.messages_out += before - self._post.unsent
        try:
            self.link.flush()
        except OSError:
            self.lose()

    def _count_bytes(self) -> None:
        if self.link is not None:
            self._traffic.bytes_out += self.link.sent_bytes
            self._traffic.bytes_in += self.link.received_bytes
            self.link.sent_bytes = self.link.received_bytes = 0

    # ---- what it reports

    def _beat(self) -> None:
        now_s = time.monotonic()
        if not self.welcome or now_s < self._beat_due_s:
            return
        late = now_s > self._beat_due_s + self._beat_s
        self._beat_due_s = (now_s if late else self._beat_due_s) + self._beat_s
        committed = self._job.committed
        moved = {n: committed for n in self.processes if self._told.get(n) != committed}
        self._told.update(moved)
        time_ns = time.monotonic_ns()
        phase = FORWARD if self._job.trains else COLLECTIVE
        marks = {
            name: Mark(self._generation.get(name, 0), step + 1, phase, 1, time_ns, step, 0)
            for name, step in moved.items()
            if self._generation.get(name)
        }
        self._put(protocol.Beat(time_ns=time_ns, marks=marks, states={}, pulses={}))
        self._count_bytes()
        if any(p == self._job.members.get(0, (None, ""))[1] for p in moved) and (
            committed % SAVE_EVERY == 0
        ):
            note = CheckpointNote(state="committed", checkpoint=f"step-{committed}", step=committed)
            self.say(self._job.members[0][1], note)

    # ---- what it is told

    def _obey(self) -> None:
        try:
            parcels = self.link.take() if self.link is not None else []
            self._heard_s = time.monotonic() if parcels else self._heard_s
            for parcel in parcels:
                self._traffic.messages_in += 1
                if isinstance(parcel.frame, protocol.Welcome):
                    self._be_welcomed(parcel.frame)
                if self._post.accept(parcel):
                    self._do(parcel.frame)
            self._pass_on()
        except (MessageError, OSError):
            self.lose()

    def _be_welcomed(self, welcome: protocol.Welcome) -> None:
        self.epoch, self._ping_s = welcome.epoch, welcome.ping_s
        if welcome.coordinator != self._coordinator:
            self._coordinator = welcome.coordinator
            self._post.renumber()
        self._told = {}
        self.welcome = True
        self._post.reconnected()

    def _do(self, frame: Any) -> None:
        match frame:
            case protocol.Ping():
                got_ns, sent_ns = time.monotonic_ns(), frame.sent_ns
                now_ns = time.monotonic_ns()
                pong = protocol.Pong(sent_ns=sent_ns, received_ns=got_ns, answered_ns=now_ns)
                self._put(pong)
            case protocol.Start():
                self._start(frame.process)
            case protocol.Tell():
                for process, message in frame.messages():
                    if process in self.processes:
                        self._order(process, message)
            case protocol.Signal():
                self._end(frame.process, frame.signum)
            case protocol.Clear():
                self._forget()
                self._post.add(protocol.Cleared())
            case protocol.Fence():
                self.fenced += 1
                self._forget()
                self._incarnation = secrets.token_hex(8)
                self._post = Post(limit=MAX_KEPT)
                self.lose()
            case protocol.Refused():
                self.refused.append(frame.why)
                self.lose()
            case protocol.Bye():
                self.die()

    def _start(self, process: str) -> None:
        pid, self._next_pid = self._next_pid, self._next_pid + 1
        self.processes[process] = pid
        self._post.add(protocol.Started(process=process, pid=pid))
        about: dict[str, Any] = {
            "steps": STEPS,
            "samples": SAMPLES,
            "global_batch": BATCH,
            "seed": SEED,
        }
        self._heard.append((process, Ready(**about, versions=self._versions)))

    def _order(self, process: str, message: Message) -> None:
        job = self._job
        answer: Joined | Parked | Status | None = None
        match message:
            case Join():
                job.told("join", message.generation, self.node)
                self._generation[process] = message.generation
                job.join(self, process, message)
                answer = _joined(generation=message.generation, step=job.committed, checkpoint=None)
            case Abort():
                job.told("abort", message.generation, self.node)
                if message.generation == self._generation.get(process):
                    job.halt() if job.generation == message.generation else None
                    answer = self.parked(process, "aborted")
            case PauseRequest():
                job.halt()
                for agent, name in list(job.members.values()):
                    agent.say(name, agent.parked(name, "pause"))
            case Inquiry():
                answer = Status(
                    place="training" if self._generation.get(process) else "waiting",
                    generation=self._generation.get(process, 0),
                    step=job.committed,
                    valid=True,
                    number=message.number,
                )
            case Stop():
                self._end(process, 0)
        if answer is not None:
            self._heard.append((process, answer))

    def _pass_on(self) -> None:
        """Pass on what ranks have said, as the real agent does after a turn, and before it tells of
        an end.
        """
        for heard in protocol.Heard.of(self._heard):
            self._post.add(heard)
        self._heard.clear()

    def parked(self, process: str, why: Any, error: str = "") -> Parked:
        """The message of a rank that leaves its generation."""
        about = {"generation": self._generation.get(process, 0), "step": self._job.committed}
        return _parked(**about, valid=True, why=why, error=error)

    def _end(self, process: str, signum: int) -> None:
        if self.processes.pop(process, None) is None:
            return
        self._pass_on()
        self._generation.pop(process, None)
        committed = self._job.committed
        self._post.add(
            protocol.Ended(
                process=process,
                exit_code=None if signum else 0,
                signal=signum or None,
                time_ns=time.monotonic_ns(),
                mark=NEVER._replace(step=committed, committed=committed),
            )
        )

    def _forget(self) -> None:
        self._heard.clear()
        self.processes.clear()
        self._generation.clear()
        self._told.clear()


@dataclass
class Order:
    """When an order of one kind and generation reached the first and the last of some nodes."""

    first_s: float
    last_s: float
    nodes: set[int] = field(default_factory=set)


class SimulatedJob:
    """The ranks of all agents, which train in lock-step: ``step_s`` seconds a step, from the moment
    at which all members of a generation know of it, until one of them is lost.
    """

    def __init__(self, *, step_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._step_s, self._clock_s = step_s, clock_s
        self.generation = self.world = 0
        self.members: dict[int, tuple[SimulatedAgent, str]] = {}
        self._base, self._since_s = 0, -1.0
        self.orders: dict[tuple[str, int], Order] = {}

    @property
    def trains(self) -> bool:
        """Whether a generation is whole and makes steps."""
        return self._since_s >= 0

    @property
    def committed(self) -> int:
        """The newest step that all ranks have committed."""
        if not self.trains:
            return self._base
        return self._base + int((self._clock_s() - self._since_s) / self._step_s)

    def halt(self) -> None:
        """A rank is lost, or the generation aborted: nobody makes another step."""
        self._base, self._since_s = self.committed, -1.0

    def told(self, kind: str, generation: int, node: int) -> None:
        """An order reached the agent of a node."""
        now_s = self._clock_s()
        order = self.orders.setdefault((kind, generation), Order(first_s=now_s, last_s=now_s))
        if node not in order.nodes:
            order.last_s = now_s
            order.nodes.add(node)

    def join(self, agent: SimulatedAgent, process: str, order: Join) -> None:
        """A rank was told to join a generation."""
        if order.generation > self.generation:
            self.halt()
            self.generation, self.world, self.members = order.generation, order.world, {}
        if order.generation == self.generation:
            self.members[order.rank] = (agent, process)
            if len(self.members) == self.world:
                self._since_s = self._clock_s()

    def lose(self, agents: set[int]) -> list[tuple[SimulatedAgent, str]]:
        """The ranks of these nodes are gone: the others stand still, and those whose ring
        neighbours they were see a broken connection. Returns the latter.
        """
        self.halt()
        ranks = sorted(self.members)
        gone = {rank for rank in ranks if self.members[rank][0].node in agents}
        beside = {
            (rank + way) % self.world for rank in gone for way in (-1, 1) if self.world
        } - gone
        return [self.members[rank] for rank in sorted(beside)]


@dataclass
class Counted:
    """What all agents have sent and received so far."""

    messages_out: int = 0
    messages_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
