"""Plays a case over the simulated agents: waits for the job, measures, strikes, measures on."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.control_plane import lies
from benchmarks.control_plane.agents import Counted, SimulatedAgent, SimulatedJob
from benchmarks.control_plane.cases import Case

LOOK_S = 0.02
SETTLE_S = 2.0  # after the last rank has joined: the first pings of all nodes are over
SLOW_S, SLOW_ONE_IN = 2.0, 20
CUTS_S = (2.0, 5.0)


class Director:
    """``agents``: grows as Locust spawns users; ``pause``: sleeps; ``agent``: makes one more agent
    of a number; ``request``: counts something as a request of Locust, by kind and milliseconds.
    ``done``: the case is played, or could not be (``problem``).
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
        self.request: Callable[[str, float], object] = lambda kind, took_ms: None
        self.agents: list[SimulatedAgent] = []
        self.dial_failures: Counter[str] = Counter()
        self.samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.marks: dict[str, float] = {"begun": time.monotonic()}
        self.counted: dict[str, dict[str, int]] = {}
        self.facts: dict[str, Any] = {}
        self.aside: set[int] = set()
        self.welcomed_s: list[float] = []
        self._known: set[int] = set()
        self.done = False
        self.problem = ""

    # ---- what is measured

    def note(self, kind: str, took_ms: float, at_s: float = 0.0) -> None:
        """Something took so long."""
        self.samples[kind].append((at_s or time.monotonic(), took_ms))
        self.request(kind, took_ms)

    def heartbeat(self, kind: str, node: int, at_s: float, took_ms: float) -> None:
        """The coordinator handled one: it counts once the job trains; those of agents that were
        made late count apart.
        """
        if at_s >= self.marks.get("steady", float("inf")):
            made_late = node in self.aside and at_s >= self.marks.get("act", float("inf"))
            self.note(f"{kind}, made late" if made_late else kind, took_ms, at_s)

    def registered(self, agent: SimulatedAgent, took_ms: float) -> None:
        """The coordinator welcomed an agent, so long after it had begun to dial."""
        self.note("register again" if agent.node in self._known else "register", took_ms)
        self._known.add(agent.node)
        self.welcomed_s.append(time.monotonic())

    def mark(self, what: str) -> None:
        """Something begins now."""
        self.marks[what] = time.monotonic()
        self.counted[what] = asdict(self._traffic)

    # ---- the play

    def play(self) -> None:
        """Play the case to its end, or to the first wait that takes too long."""
        case = self._case
        try:
            welcome = lambda: sum(agent.welcome for agent in self.agents)  # noqa: E731
            self._until(lambda: welcome() >= case.agents, "all agents are admitted")
            self.mark("admitted")
            self._until(lambda: self._job.trains, "the job trains")
            self.mark("trains")
            self._pause(SETTLE_S)
            self.mark("steady")
            self._pause(case.steady_s)
            self.mark("act")
            if case.name != "steady":
                getattr(self, f"_{case.name}")()
                self.mark("answered")
                self._pause(case.hold_s)
        except TimeoutError as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.mark("end")
            self.done = True

    def _until(self, done: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + self._case.limit_s
        while not done():
            if time.monotonic() > until_s:
                raise TimeoutError(f"not within {self._case.limit_s:g} s: {what}")
            self._pause(LOOK_S)

    def _rack(self) -> None:
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
        self.note("failure to decision", 1000 * (join.first_s - cut_s))
        self.note("regroup broadcast", 1000 * (join.last_s - join.first_s))
        if abort := job.orders.get(("abort", before)):
            self.note("failure to abort", 1000 * (abort.first_s - cut_s))
            self.note("abort broadcast", 1000 * (abort.last_s - abort.first_s))
        self.facts |= {"struck": len(struck), "generation": job.generation}
        self.facts |= {"world": job.world, "told": len(join.nodes)}

    _tenth = _rack

    def _restart(self) -> None:
        """Have the coordinator killed and started again, and wait until all agents are back."""
        before = {agent.node: agent.epoch for agent in self.agents}
        generation, welcomed = self._job.generation, len(self.welcomed_s)
        os.write(self._case.asks, b"restart\n")
        self._until(
            lambda: all(a.welcome and a.epoch > before[a.node] for a in self.agents),
            "all agents are admitted again",
        )
        back = self.welcomed_s[welcomed:]
        self.note("herd, first to last", 1000 * (max(back) - min(back)))
        self.facts["down_s"] = round(min(back) - self.marks["act"], 3)
        self.facts["same_generation"] = self._job.generation == generation
        if self._job.generation != generation or not self._job.trains:
            self.problem = "the restart of the coordinator disturbed the job"

    def _slow(self) -> None:
        """Have one agent in twenty answer late from now on, and wait for three such answers."""
        for agent in self.agents[::SLOW_ONE_IN]:
            agent.slow_s = SLOW_S
            self.aside.add(agent.node)
        self._pause(3 * SLOW_S)
        self.facts["slow"] = len(self.aside)

    def _cuts(self) -> None:
        """Cut a quarter of the agents off for each of CUTS_S, and wait until all are back."""
        now_s, cut = time.monotonic(), list(self.agents)
        for turn, seconds in enumerate(CUTS_S):
            for agent in cut[turn::4]:
                agent.deaf_until_s = now_s + seconds
                self.aside.add(agent.node)
        self._pause(max(CUTS_S) + 2 * self._case.beat_s)
        self._until(lambda: all(agent.welcome for agent in cut), "all cut agents are back")
        self.facts["cut"] = len(self.aside)

    def _lying(self) -> None:
        """Let strangers and agents lie; the lies have to be refused, and to change nothing."""
        generation = self._job.generation
        self.facts["lies"] = said = lies.tell(self.agents, self._job, self._agent, self._pause)
        self.aside |= set(said["reset"])
        self._until(lambda: all(agent.welcome for agent in self.agents), "liars are back")
        believed = [name for name, taken in said["believed"].items() if taken]
        if believed or self._job.generation != generation or not self._job.trains:
            self.problem = f"a lie was believed: {believed or 'the generation ended'}"

    def write(self) -> None:
        """Write what was found for ``benchmarks.control_plane.load``."""
        names = ("problem", "samples", "marks", "counted", "facts")
        found = {name: getattr(self, name) for name in names}
        found["dial_failures"] = dict(self.dial_failures.most_common(10))
        found["fenced"] = sum(agent.fenced for agent in self.agents)
        self._case.file("found.json").write_text(json.dumps(found))
