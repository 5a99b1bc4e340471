"""Plays a case over the simulated agents: waits for the job, measures, strikes, measures on."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.control_plane.agents import Counted, SimulatedAgent, SimulatedJob
from benchmarks.control_plane.cases import Case

LOOK_S = 0.02
SETTLE_S = 2.0  # after the last rank has joined: the first pings of all nodes are over
SLOW_S, SLOW_ONE_IN = 2.0, 20
CUTS_S = (2.0, 5.0)


class Director:
    """``agents``: grows as Locust spawns users; ``pause``: sleeps; ``agent``: makes one more agent
    of a number. ``done``: the case is played, or could not be (``problem``).
    """

    def __init__(
        self,
        case: Case,
        job: SimulatedJob,
        traffic: Counted,
        *,
        pause: Callable[[float], object],
        agent: Callable[[int], SimulatedAgent],
    ) -> None:
        self._case, self._job, self._traffic = case, job, traffic
        self._pause, self._agent = pause, agent
        self.agents: list[SimulatedAgent] = []
        self.dial_failures: Counter[str] = Counter()
        self.samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.marks: dict[str, float] = {"begun": time.monotonic()}
        self.counted: dict[str, dict[str, int]] = {}
        self.facts: dict[str, Any] = {}
        self.done = False
        self.problem = ""

    # ---- what is measured

    def note(self, kind: str, took_ms: float, environment: Any, *, at_s: float = 0.0) -> None:
        """Something took so long: kept, and counted by Locust as a request."""
        self.samples[kind].append((at_s or time.monotonic(), took_ms))
        environment.events.request.fire(
            request_type="agent",
            name=kind,
            response_time=took_ms,
            response_length=0,
            exception=None,
            context={},
        )

    def measures(self, at_s: float) -> bool:
        """Whether heartbeats of this time count: once the job trains."""
        return at_s >= self.marks.get("steady", float("inf"))

    def mark(self, what: str) -> None:
        """Something begins now."""
        self.marks[what] = time.monotonic()
        self.counted[what] = asdict(self._traffic)

    # ---- the play

    def play(self, environment: Any) -> None:
        """Play the case to its end, or to the first wait that takes too long."""
        try:
            self._play(environment)
        except TimeoutError as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.mark("end")
            self.done = True

    def _play(self, environment: Any) -> None:
        case = self._case
        self._until(lambda: len(self._welcome()) >= case.agents, "all agents are admitted")
        self.mark("admitted")
        self._until(lambda: self._job.trains, "the job trains")
        self.mark("trains")
        self._pause(SETTLE_S)
        self.mark("steady")
        self._pause(case.steady_s)
        self.mark("act")
        if case.name != "steady":
            getattr(self, f"_{case.name}")(environment)
            self.mark("answered")
            self._pause(case.hold_s)

    def _welcome(self) -> list[SimulatedAgent]:
        return [agent for agent in self.agents if agent.welcome]

    def _until(self, done: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + self._case.limit_s
        while not done():
            if time.monotonic() > until_s:
                raise TimeoutError(f"not within {self._case.limit_s:g} s: {what}")
            self._pause(LOOK_S)

    def _rack(self, environment: Any) -> None:
        self._kill(environment)

    def _tenth(self, environment: Any) -> None:
        self._kill(environment)

    def _kill(self, environment: Any) -> None:
        """Kill the struck nodes at once, and wait until all others train in the next generation."""
        job, struck = self._job, self._case.struck()
        before = job.generation
        cut_s = time.monotonic()
        for agent in self.agents:
            if agent.node in struck:
                agent.die()
        for agent, process in job.lose(set(struck)):
            error = "connection closed by peer"
            agent.say(process, agent.parked(process, "failed", error))
        self._until(lambda: job.generation > before and job.trains, "the survivors regrouped")
        join = job.orders["join", job.generation]
        abort = job.orders.get(("abort", before))
        self.note("failure to decision", 1000 * (join.first_s - cut_s), environment)
        self.note("regroup broadcast", 1000 * (join.last_s - join.first_s), environment)
        if abort is not None:
            self.note("failure to abort", 1000 * (abort.first_s - cut_s), environment)
            self.note("abort broadcast", 1000 * (abort.last_s - abort.first_s), environment)
        self.facts |= {
            "struck": len(struck),
            "generation": job.generation,
            "world": job.world,
            "told": len(join.nodes),
        }

    # ---- the end

    def write(self) -> None:
        """Write what was found for ``benchmarks.control_plane.load``."""
        found = {
            "problem": self.problem,
            "samples": self.samples,
            "marks": self.marks,
            "counted": self.counted,
            "dial_failures": dict(self.dial_failures.most_common(10)),
            "fenced": sum(agent.fenced for agent in self.agents),
            "facts": self.facts,
            "pid": os.getpid(),
        }
        Path(self._case.out).write_text(json.dumps(found))
