"""Locust's part: each user is a simulated node agent; the shape ramps them up and ends the test
when the case is played. Started by ``benchmarks.control_plane.load``, which says what to play.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import gevent
import locust.stats
from gevent import socket as waits
from locust import LoadTestShape, User, constant, events, task

from benchmarks.control_plane.agents import Counted, SimulatedAgent, SimulatedJob
from benchmarks.control_plane.cases import CASE_VARIABLE, Case
from benchmarks.control_plane.coordinator import RECORD, records
from benchmarks.control_plane.director import Director
from benchmarks.control_plane.load import HOST

CASE = Case.read(Path(os.environ[CASE_VARIABLE]))
TOKEN = bytes.fromhex(CASE.file("token").read_text())
TAIL_S = 0.5
AT_ONCE = 32  # notes of the probe, 25 us each
locust.stats.CONSOLE_STATS_INTERVAL_SEC = 10


def _wait(fd: int, timeout_s: float) -> None:
    try:
        waits.wait_read(fd, timeout=timeout_s)
    except TimeoutError:
        return


def _agent(node: int) -> SimulatedAgent:
    return SimulatedAgent(
        node,
        JOB,
        address=(HOST, CASE.port),
        token=TOKEN,
        wait=_wait,
        pause=gevent.sleep,
        traffic=TRAFFIC,
        beat_s=CASE.beat_s,
    )


JOB = SimulatedJob(step_s=CASE.beat_s)
TRAFFIC = Counted()
DIRECTOR = Director(CASE, JOB, TRAFFIC, pause=gevent.sleep, agent=_agent)
_numbers = itertools.count()


class NodeAgentUser(User):  # type: ignore[misc]  # Locust has no types
    """One node: a simulated agent, which dials, obeys, and reports at each turn of its task."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Take the next number."""
        self.agent = _agent(next(_numbers))
        DIRECTOR.agents.append(self.agent)

    @task
    def serve(self) -> None:
        """Serve the coordinator until the next heartbeat; dial first if there is no connection."""
        agent = self.agent
        if agent.ended:
            gevent.sleep(1.0)
            return
        if agent.link is None:
            dialled_s = time.monotonic()
            for why in agent.dial():
                DIRECTOR.dial_failures[why] += 1
            while not agent.welcome and agent.link is not None and not agent.ended:
                agent.serve(time.monotonic() + CASE.beat_s)
            if agent.welcome:
                DIRECTOR.registered(agent, 1000 * (time.monotonic() - dialled_s))
        agent.serve(time.monotonic() + CASE.beat_s)


class CaseShape(LoadTestShape):  # type: ignore[misc]  # Locust has no types
    """All agents at the ramp's pace; the end when the director has played the case."""

    def tick(self) -> tuple[int, float] | None:
        """Users and spawn rate; None: the end."""
        return None if DIRECTOR.done else (CASE.agents, CASE.ramp)


def _tail() -> None:
    """Report the heartbeats that the coordinator's probe has noted since."""
    offset = 0
    while True:
        gevent.sleep(TAIL_S)
        try:
            with CASE.file("probe").open("rb") as probe:
                probe.seek(offset)
                data = probe.read()
        except OSError:
            continue
        offset += len(data) - len(data) % RECORD.size
        for number, record in enumerate(records(data), 1):
            DIRECTOR.heartbeat(*record)
            if not number % AT_ONCE:
                gevent.sleep(0)  # else the agents would answer nobody for up to a tenth of a second


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _begin(environment: Any, **_: Any) -> None:
    def request(kind: str, took_ms: float) -> None:
        about: dict[str, Any] = {"response_length": 0, "exception": None, "context": {}}
        fire = environment.events.request.fire
        fire(request_type="agent", name=kind, response_time=took_ms, **about)

    DIRECTOR.request = request
    gevent.spawn(_tail)
    gevent.spawn(DIRECTOR.play)


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def _end(environment: Any, **_: Any) -> None:
    DIRECTOR.write()
    environment.process_exit_code = 0 if not DIRECTOR.problem else 1
