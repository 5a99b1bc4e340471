"""Asks places for measurements within a time, and keeps what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainchaos.harness.preflight import compare, worker
from trainchaos.harness.preflight.checks.check import Task, is_cuda
from trainchaos.harness.preflight.checks.disk import nearest
from trainchaos.harness.preflight.checks.findings import HOST, Finding, Rate
from trainchaos.harness.preflight.places import Answer, Order
from trainchaos.recovery.policy.jobconfig import LOOPBACK

CAPS_S: Mapping[str, tuple[float, float]] = {
    "memory": (5.0, 20.0),
    "product": (0.7, 5.0),
    "clocks": (0.4, 2.0),
    "disk": (2.0, 2.0),
    "store": (0.5, 0.5),
    compare.BANDWIDTH: (0.1, 0.5),
    compare.ALL_REDUCE: (0.1, 0.5),
}
"""Seconds of one measurement of one place: of the CPU, of a GPU. What they cost: docs/health.md."""
GRACE_S = 10.0
"""Beyond five times its seconds, until a place that does not answer is given up: the first use of a
GPU takes some of them, and a busy machine may take all.
"""
LEAST_S = 0.5
"""With less time left nothing more is begun."""
SHORT = ("OutOfMemoryError", "MemoryError", "AssertionError", "ImportError", "ModuleNotFoundError")
"""Errors that say nothing of a device: memory that others use, a torch built without it."""


class Machine(Protocol):
    """The places, as ``harness.preflight.places.Places``."""

    def ask(self, orders: Mapping[str, Order], *, limit_s: float) -> dict[str, Answer]:
        """Have several places measure at once."""


class Unmeasurable(Exception):
    """Nothing more can be measured of a check: ``why``, and ``todo``."""

    def __init__(self, why: str, todo: str) -> None:
        super().__init__(why)
        self.why, self.todo = why, todo


class Asking:
    """``machine``: has a process for each of ``names``, and ``HOST``; ``until_s``: when to end, on
    ``clock``; ``prefix``: of all keys in a store that an earlier one may have used. ``lost``:
    places that do not answer any more, and why.
    """

    def __init__(
        self,
        machine: Machine,
        names: Sequence[str],
        directory: Path,
        *,
        until_s: float,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        prefix: str = "",
    ) -> None:
        self._machine, self._directory = machine, directory
        self._until_s, self._seed, self._clock = until_s, seed, clock
        self._port: int | None = None
        self._prefix, self._keys = prefix, 0
        self.names = list(names)
        self.lost: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.rates: list[Rate] = []

    def living(self) -> list[str]:
        """Places that still answer."""
        return [name for name in self.names if name not in self.lost]

    def key(self) -> str:
        """Another prefix of keys in the store at each call."""
        self._keys += 1
        return f"{self._prefix}group-{self._keys}/"

    def left_s(self) -> float:
        """Seconds. Raises Unmeasurable for less than LEAST_S."""
        left_s = self._until_s - self._clock()
        if left_s < LEAST_S:
            raise Unmeasurable("no time was left", "raise --preflight-time")
        return left_s

    def task(self, check: str, place: str, **options: Any) -> Task:
        """For one place, with the seconds of a check. Raises Unmeasurable."""
        budget_s = min(CAPS_S[check][is_cuda(place)], self.left_s() / 4.0)
        return Task(
            place=place,
            budget_s=budget_s,
            seed=self._seed,
            directory=str(nearest(self._directory)),
            options=options,
        )

    def ask(
        self, check: str, tasks: Mapping[str, Task], do: str = "", *, more_s: float = 0.0
    ) -> dict[str, Answer]:
        """Answers of places; one that is silent for longer than it may is a finding, unless the
        preflight's own time was shorter. ``more_s``: how long it may wait for others.
        """
        budget_s = max(task.budget_s for task in tasks.values())
        wanted_s, left_s = 5.0 * budget_s + GRACE_S + more_s, self.left_s()
        orders = {place: Order(do=do or check, task=task) for place, task in tasks.items()}
        answers = self._machine.ask(orders, limit_s=min(wanted_s, left_s))
        for place, answer in answers.items():
            if answer.kind in ("silent", "ended") and place not in self.lost:
                self.lost[place] = answer.error
                killed = answer.kind == "ended" and "signal 9" in answer.error
                hurt = left_s >= wanted_s if answer.kind == "silent" else not killed
                if hurt:
                    self.broken(check, place, answer.error)
        return answers

    def store(self) -> dict[str, Any]:
        """Address of the store, which the process of the host serves, or where a disk holds that
        one up, the first place that is left. Raises Unmeasurable.
        """
        if self._port is None:
            alive = [name for name in (HOST, *self.names) if name not in self.lost]
            if not alive:
                raise Unmeasurable("no process is left that could serve a store", "")
            task = self.task("store", alive[0], host=LOOPBACK)
            answer = self.ask("store", {alive[0]: task}, worker.SERVE)[alive[0]]
            if answer.found is None:
                why = f"no store could be started: {answer.error}"
                raise Unmeasurable(why, f"free a port on {LOOPBACK}")
            self._port = int(answer.found["port"])
        return {"port": self._port, "host": LOOPBACK}

    def has(self, check: str, place: str) -> bool:
        """Whether there is a finding."""
        return any((one.check, one.place) == (check, place) for one in self.findings)

    def failed(self, check: str, place: str, answer: Answer) -> None:
        """A finding of an answer that is an error."""
        short = answer.kind in SHORT or "allocate memory" in answer.error
        if answer.kind in ("silent", "ended") or short:
            self.unmeasured(check, place, answer.error, "free memory" if short else "")
        else:
            self.broken(check, place, f"{answer.kind}: {answer.error}")

    def broken(self, check: str, place: str, why: str) -> None:
        """A place fails by itself."""
        todo = "take the place out; dmesg and chaos explain say what an XID or a signal means"
        self.findings.append(Finding(check=check, place=place, state="unfit", said=why, todo=todo))

    def unmeasured(self, check: str, place: str, why: str, todo: str) -> None:
        """Nothing is known of a place."""
        self.findings.append(
            Finding(check=check, place=place, state="unmeasured", said=why, todo=todo)
        )
