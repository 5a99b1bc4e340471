"""The agent of one node: connects to a coordinator, and starts and watches the node's processes for
it.

Without its coordinator it continues alone: processes train on, and their messages and exits are
kept and sent later, in order. It ends when the coordinator says so, or has been away for the lease;
its processes end with it.
"""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainchaos.recovery.health.checks import PlaceChecks
from trainchaos.recovery.health.service import machine_service
from trainchaos.recovery.nodes.agent.agent_processes import AgentProcesses, Beats
from trainchaos.recovery.nodes.agent.dialer import Dialer
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.beat_rate import LEAST_S
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.nodes.link.files import refuse_shared
from trainchaos.recovery.nodes.link.link import FULL, Link, Post
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.forkserver import LaunchRecipe
from trainchaos.recovery.process.output import say
from trainchaos.recovery.process.pressure import EVERY_S, PressureReader
from trainchaos.recovery.transport.stream import Message, MessageError

LEASE_S = 120.0
IDLE_BEAT_S = 0.5  # with no processes
MAX_KEPT = 200_000  # messages that wait for a coordinator that is away
OLD_COORDINATOR_S = 1.0
SILENT_PINGS = 3.0
"""Pings that may be missing: a cut network may keep a dead connection open for long."""
# between two turns: after a longer gap the agent slept, and the coordinator was not silent
ASLEEP_S = 1.0
STRAYS_EVERY_S = 2.0
REJECTED_SOONEST_S, REJECTED_LATEST_S = 0.05, 1.0
"""Until a coordinator that did not admit this agent is dialled again, ever more slowly. The agent
does not end at once: it may be the successor of one whose connection still counts as alive.
"""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Configuration of an agent. ``coordinator``: its address; ``address``: of this node, "": the
    one from which it reaches the coordinator; ``scratch``: directory for event logs and outputs;
    ``lease_s``: how long it continues without a coordinator; ``devices``: as torch names them;
    ``coordinator_boot``: boot id of its machine: if it is this machine's too, memory that ranks
    share with their agent lies in files, so that nothing they wrote is lost with the node;
    ``reports``: a file to which monitors of the node append health reports; ``check``: the program
    that finds out whether a place is fit (``recovery.health.checks.PlaceChecks``).
    """

    coordinator: tuple[str, int]
    node: int
    address: str
    token: bytes
    scratch: Path
    recipe: LaunchRecipe
    lease_s: float = LEASE_S
    coordinator_boot: str = ""
    devices: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    reports: Path | None = None
    check: Sequence[str] = ()


class NodeAgent:
    """Call ``run`` on the main thread of a process of its own. Raises InfrastructureError, and
    ScenarioError where its scratch directory is its coordinator's.
    """

    def __init__(self, config: AgentConfig) -> None:
        processes.become_subreaper()
        self._config = config
        self._server = config.recipe.server()
        self._dialer = Dialer(
            config.coordinator,
            config.token,
            node=config.node,
            source=config.address,
            say=self._say,
        )
        self._link: Link | None = None
        self._welcome = False
        self._epoch, self._beat_s, self._ping_s = 0, LEAST_S, 1.0
        self._coordinator = ""
        self._away_s = self._heard_s = self._turned_s = time.monotonic()
        self._ended = ""
        self.abandoned = False  # its lease has run out
        self.rejected = False  # and no coordinator has ever admitted it, though one was there
        self._why_rejected, self._pause_s = "", 0.0
        self._warned = False
        self._wake, self._waker = os.pipe()
        for fd in (self._wake, self._waker):
            os.set_blocking(fd, False)
        self._strays: set[int] = set()
        self._strays_due_s = 0.0
        self._read: list[Path] = []  # files of arms that are over
        self._pressure, self._pressure_due_s = PressureReader(), 0.0
        self._health = machine_service(config.devices, reports=config.reports, notify=self._ring)
        self._checks = PlaceChecks(config.check)
        self._begin()

    def _begin(self) -> None:
        """Begin as an agent that is unknown to every coordinator."""
        self._incarnation = secrets.token_hex(8)
        self._post = Post(limit=MAX_KEPT)
        self._reset()

    def _reset(self) -> None:
        """Begin without processes."""
        config = self._config
        named = config.coordinator_boot == boot_id()
        self._processes = AgentProcesses(
            self._server, config.recipe, self._post, config.scratch, named=named
        )
        self._checks.close()
        self._beats = Beats(self._beat_s)
        self._looked_s = 0.0

    def run(self) -> str:
        """Serve until told to end; returns the reason. Everything it started has ended then. Raises
        InfrastructureError when processes cannot be started here at all.
        """
        try:
            self._server.await_ready()
            self._health.start()
            self._away_s = time.monotonic()
            self._dialer.dial()
            while not self._ended:
                self._turn()
        finally:
            self._close()
        return self._ended

    def warn(self) -> None:
        """The node will be ended soon: report it to the coordinator and all ranks. May be called by
        a signal handler.
        """
        self._warned = True
        self._ring()

    def end(self, why: str) -> None:
        """End now. May be called by a signal handler."""
        self._ended = self._ended or why
        self._ring()

    # ---- the loop

    def _turn(self) -> None:
        poll = select.poll()
        for fd in (self._processes.fileno(), self._wake, self._dialer.fileno()):
            poll.register(fd, select.POLLIN)
        if self._link is not None:
            more = select.POLLOUT if self._link.waiting else 0
            poll.register(self._link.fileno(), select.POLLIN | more)
        due_s = self._looked_s + (LEAST_S if self._processes.pids else IDLE_BEAT_S)
        poll.poll(max(0.0, due_s - time.monotonic()) * 1000)
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        reports = self._processes.reports()
        if reports:
            self._beat(time.monotonic(), at_once=True)  # the coordinator reads the marks next
        self._processes.tell_of(reports)
        self._say_hello()
        self._obey()
        self._tell_of_warning()
        self._tell_of_health()
        now_s = time.monotonic()
        if now_s >= self._looked_s + LEAST_S:
            self._looked_s = now_s
            self._processes.forward_stacks()
            if self._keeps_up and not self._post.unsent:
                self._processes.forward()
            self._beat(now_s)
            self._press(now_s)
        self._send()
        self._look_around(now_s)

    @property
    def _keeps_up(self) -> bool:
        """Whether a coordinator is connected and keeps up with what is sent."""
        return self._welcome and self._link is not None and self._link.waiting < FULL

    def _put(self, frame: Message | None) -> None:
        """Send what may be lost."""
        if frame is not None and self._link is not None:
            self._link.put(frame, got=self._post.received)

    def _beat(self, now_s: float, *, at_once: bool = False) -> None:
        """Send what changed. Dropped when the coordinator does not keep up."""
        if self._keeps_up:
            self._put(self._beats.due(self._processes, now_s, at_once=at_once))

    def _press(self, now_s: float) -> None:
        """Report now and again how short of CPU the ranks are; dropped as a beat is."""
        ranks = self._processes.ranks()
        if now_s < self._pressure_due_s or not ranks or not self._keeps_up:
            return
        self._pressure_due_s = now_s + EVERY_S
        if (reading := self._pressure.read(ranks)) is not None:
            self._put(protocol.Pressed(time_ns=time.monotonic_ns(), reading=reading))

    def _show(self) -> None:
        """Show that the agent is alive while something takes long on this machine."""
        self._beat(time.monotonic())
        with suppress(OSError):  # the next turn notices the error, too
            if self._link is not None:
                self._link.flush()

    def _send(self) -> None:
        if self._link is None:
            return
        if self._welcome:
            self._post.pump(self._link)
        try:
            self._link.flush()
        except OSError as error:
            self._lose(str(error))

    def _look_around(self, now_s: float) -> None:
        self._reap_strays(
            now_s, {*self._processes.pids.values(), self._server.process.pid, *self._checks.pids}
        )
        if now_s > self._turned_s + ASLEEP_S:  # this process slept
            self._heard_s = now_s
        self._turned_s = now_s
        if now_s > self._heard_s + (silent_s := SILENT_PINGS * self._ping_s):
            self._lose(f"nothing came for {silent_s:g} s")
        if not self._welcome and now_s > self._away_s + self._config.lease_s:
            self._give_up()
        if not len(self._post):
            self._forget_files()
        if self._post.full:
            self.end(f"{MAX_KEPT} messages wait for a coordinator that does not take them")

    def _reap_strays(self, now_s: float, ours: Collection[int]) -> None:
        """Now and again, orphans of its processes, which become children of this process. ``ours``:
        children that others wait for. A child that is seen ended twice is an orphan.
        """
        if now_s < self._strays_due_s:
            return
        self._strays_due_s = now_s + STRAYS_EVERY_S
        ended = ["Z", str(os.getpid())]
        found = {
            pid for pid, fields in processes.everybody() if fields[:2] == ended and pid not in ours
        }
        for pid in found & self._strays:
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        self._strays = found

    def _give_up(self) -> None:
        """The lease has run out."""
        why = "the token was refused" if self._dialer.refused else self._why_rejected
        self.abandoned, self.rejected = True, bool(why) and not self._epoch
        lease = f"for {self._config.lease_s:g} s"
        self.end(f"not admitted {lease}: {why}" if why else f"the coordinator was away {lease}")

    def _forget_files(self) -> None:
        """Delete files that the coordinator has in full."""
        for path in self._read:
            with suppress(OSError):
                path.unlink()
        self._read.clear()

    # ---- the coordinator

    def _say_hello(self) -> None:
        link = self._dialer.link()
        if link is None:
            return
        self._link = link
        self._heard_s = time.monotonic()
        config = self._config
        self._put(
            protocol.Hello(
                node=config.node,
                incarnation=self._incarnation,
                epoch=self._epoch,
                host=os.uname().nodename,
                boot=boot_id(),
                address=config.address or link.address,
                devices=config.devices,
                scratch=str(config.scratch),
                processes=dict(self._processes.pids),
                versions=dict(config.versions),
                lease_s=config.lease_s,
            )
        )

    def _obey(self) -> None:
        if self._link is None:
            return
        try:
            parcels = self._link.take()
            self._heard_s = time.monotonic() if parcels else self._heard_s
            for parcel in parcels:
                if isinstance(parcel.frame, protocol.Welcome):
                    self._be_welcomed(parcel.frame)
                elif not self._welcome and not isinstance(
                    parcel.frame, protocol.Fence | protocol.Refused
                ):
                    raise MessageError(f"{type(parcel.frame).__name__} before a welcome")
                if self._link is None:
                    return
                if self._post.accept(parcel):
                    self._do(parcel.frame)
        except (MessageError, OSError) as error:
            self._lose(str(error))

    def _be_welcomed(self, welcome: protocol.Welcome) -> None:
        if welcome.epoch < self._epoch:
            why = f"its epoch is {welcome.epoch}, and one of {self._epoch} was obeyed before"
            self._lose(why, OLD_COORDINATOR_S)
            return
        refuse_shared(self._config.scratch)  # the supervisor may have begun later than this agent
        self._epoch = welcome.epoch
        if welcome.coordinator != self._coordinator:
            self._coordinator = welcome.coordinator
            self._post.renumber()
            # the previous coordinator may have died before it recorded the exits
            for ended in self._processes.ended:
                self._post.add(ended)
        self._welcome = True
        self._why_rejected, self._pause_s = "", 0.0
        self._post.reconnected()
        self._beat_s, self._ping_s = welcome.beat_s, welcome.ping_s
        self._beats = Beats(self._beat_s)  # this coordinator may know nothing

    def _do(self, frame: Any) -> None:
        match frame:
            case protocol.Start():
                self._processes.start(frame, self._show)
            case protocol.Tell():
                for process, message in frame.messages():
                    self._processes.tell(process, message)
            case protocol.Signal():
                self._processes.signal(frame.process, frame.signum)
            case protocol.Ping():
                received_ns = time.monotonic_ns()
                self._put(
                    protocol.Pong(
                        sent_ns=frame.sent_ns,
                        received_ns=received_ns,
                        answered_ns=time.monotonic_ns(),
                    )
                )
            case protocol.Check():
                self._checks.begin((self._config.node, frame.device))
            case protocol.Clear():
                left = self._processes.clear()
                self._read += self._processes.files()
                self._reset()
                self._post.add(protocol.Cleared(left=left))
            case protocol.Fence():
                self._say("given up by the coordinator: everything here is killed, and begins anew")
                self._processes.clear()
                self._lose("")
                self._begin()
            case protocol.Refused():
                if frame.why != self._why_rejected:
                    self._why_rejected = frame.why
                    self._say(f"turned away by the coordinator, and dials again: {frame.why}")
                self._lose("")
            case protocol.Bye():
                self.end("the run is over")

    def _lose(self, why: str, after_s: float = 0.0) -> None:
        """Drop the connection. Only the end of this process closes one in order."""
        if self._link is None:
            return
        self._link.reset()
        self._link = None
        if self._welcome:
            self._away_s = time.monotonic()
        else:  # the connection came to nothing
            after_s = max(after_s, self._pause_s)
            self._pause_s = min(REJECTED_LATEST_S, max(REJECTED_SOONEST_S, 2 * self._pause_s))
        self._welcome = False
        if why:
            self._say(f"the connection to the coordinator ended: {why}")
        self._dialer.dial(after_s=after_s)

    def _tell_of_warning(self) -> None:
        if self._warned:
            self._warned = False
            self._post.add(protocol.Warned())
            self._processes.warn()

    def _tell_of_health(self) -> None:
        if signs := self._health.take():
            self._post.add(protocol.Found.of(signs))
        for problem in self._health.problems():
            self._say(f"health: {problem}")
        for (_, device), fit, said, _ in self._checks.take():
            self._post.add(protocol.Checked(device=device, fit=fit, said=said))

    # ---- helpers

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # the loop is awake already
            os.write(self._waker, b"!")

    def _say(self, text: str) -> None:
        say(text, who=f"agent of node {self._config.node}")

    def _close(self) -> None:
        self._health.close()
        self._checks.close()
        self._processes.clear()
        if not len(self._post):
            self._forget_files()
        if self._link is not None:
            self._link.close()
        self._dialer.close()
        self._server.close()
        for fd in (self._wake, self._waker):
            os.close(fd)
