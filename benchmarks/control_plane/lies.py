"""Lies that a coordinator has to refuse: of strangers, and of agents that it has admitted."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from benchmarks.control_plane.agents import SimulatedAgent, SimulatedJob
from trainchaos.recovery.nodes.link import handshake, protocol
from trainchaos.recovery.transport.auth import AuthenticationFailed, TokenRefused
from trainchaos.recovery.transport.progress_counters import NEVER
from trainchaos.recovery.transport.stream import framed
from trainchaos.recovery.transport.wire import Joined, Parked

ANSWER_S = 5.0
TIMES = 4
WRONG_GENERATION = 999
NO_PHASE = "none"


def tell(
    agents: Sequence[SimulatedAgent],
    job: SimulatedJob,
    agent: Callable[[int], SimulatedAgent],
    pause: Callable[[float], object],
) -> dict[str, Any]:
    """Tell all of them. ``believed``: of each kind, how many were not refused; ``reset``: nodes
    whose connection the coordinator is to reset for it. ``agent``: makes a stranger that knows the
    token, with the number of a node; ``pause``: sleeps.
    """
    liar, victim = agents[0], agents[-1]
    own, foreign = next(iter(liar.processes)), next(iter(victim.processes))
    believed = {
        name: sum(not refused(agent(of.node)) for _ in range(TIMES))
        for name, refused, of in (
            ("a wrong token", _wrong_token, liar),
            ("garbage", _garbage, liar),
            ("no message", _no_message, victim),
            ("another's number", _another, victim),
        )
    }
    committed, time_ns = job.committed, time.monotonic_ns()
    about: dict[str, Any] = {"generation": WRONG_GENERATION, "step": committed}
    liar.say(own, Parked(**about, valid=True, why="failed"))
    liar.say(own, Joined(**about, checkpoint=None))
    liar.say(foreign, Parked(generation=job.generation, step=committed, valid=True, why="failed"))
    words = NEVER._replace(generation=job.generation, time_ns=1)
    liar.put_raw(protocol.Beat(time_ns=time_ns, marks={foreign: words}, states={foreign: "T"}))
    liar.put_raw(
        protocol.Ended(process=foreign, exit_code=None, signal=9, time_ns=time_ns, mark=words)
    )
    link = liar.link
    pause(1.0)
    believed["of another's processes"] = int(not victim.welcome or not job.trains)
    unknown = words._replace(phase=NO_PHASE)
    liar.put_raw(protocol.Beat(time_ns=time_ns, marks={own: unknown}, states={}))
    until_s = time.monotonic() + ANSWER_S
    while liar.link is link and time.monotonic() < until_s:
        pause(0.02)
    believed["a phase that is none"] = int(liar.link is link)
    return {"believed": believed, "told": TIMES, "reset": [liar.node]}


def _wrong_token(stranger: SimulatedAgent) -> bool:
    """Whether another token is refused."""
    with socket.create_connection(stranger.address, timeout=ANSWER_S) as sock:
        try:
            handshake.enter(sock, b"?" * 32, node=stranger.node)
        except TokenRefused:
            return True
        except (AuthenticationFailed, OSError):
            return False
    return False


def _garbage(stranger: SimulatedAgent) -> bool:
    """Whether a connection that begins with noise is closed."""
    with socket.create_connection(stranger.address, timeout=ANSWER_S) as sock:
        sock.sendall(b"\xff" * 4 + os.urandom(512))
        return _is_closed(sock)


def _no_message(stranger: SimulatedAgent) -> bool:
    """Whether an agent that knows the token and sends no message is turned away."""
    with socket.create_connection(stranger.address, timeout=ANSWER_S) as sock:
        key = handshake.enter(sock, stranger.token, node=stranger.node)
        sending, _ = handshake.seals(key, agent=True)
        sock.sendall(framed(sending.seal(b'[0,0,{"type":"Hello"')))
        return _is_closed(sock)


def _is_closed(sock: socket.socket) -> bool:
    """Whether the other side ends the connection in time, whatever it sends before."""
    sock.settimeout(ANSWER_S)
    with suppress(ConnectionError):
        try:
            while sock.recv(4096):
                pass
        except TimeoutError:
            return False
    return True


def _another(stranger: SimulatedAgent) -> bool:
    """Whether a second agent for a node that has one is refused."""
    for _ in stranger.dial():
        return False
    until_s = time.monotonic() + ANSWER_S
    while stranger.link is not None and not stranger.welcome and time.monotonic() < until_s:
        stranger.serve(time.monotonic() + 0.02)
    refused = bool(stranger.refused) and not stranger.welcome
    stranger.die()
    return refused
