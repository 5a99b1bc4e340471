"""What a check is: it asks places to measure within a time, and says what that means.

``Check.measure`` runs in a place's own process, all else in the one that asks. A check of single
places is a ``PlaceCheck``: it has a measurement, and a judgement over what was measured.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from trainchaos.harness.preflight.checks.findings import HOST, Finding, Rate
from trainchaos.recovery.policy.jobconfig import LOOPBACK

Measured = Mapping[str, Any]
"""JSON, as it travels from the process that measures."""
SERVE = "serve-store"
"""Asks a place to serve a store, which no check measures."""
GRACE_S = 10.0
"""Beyond five times its seconds, until a place that does not answer is given up: the first use of a
GPU takes some of them, and a busy machine may take all.
"""
LEAST_S = 0.5
"""With less time left nothing more is begun."""
SHORT = ("OutOfMemoryError", "MemoryError", "AssertionError", "ImportError", "ModuleNotFoundError")
"""Errors that say nothing of a device: memory that others use, a torch built without it."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be measured. ``place``: ``cpu:2``, ``cuda:0`` or ``host``; ``budget_s``: seconds
    after which nothing more is begun; ``directory``: of the disk to be measured.
    """

    place: str
    budget_s: float
    seed: int = 0
    directory: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``found``: what was measured, None where it was not. ``error``: why; ``kind``: the type of an
    exception, ``ended`` (the process did) or ``silent`` (no answer within the time).
    """

    found: Measured | None = None
    error: str = ""
    kind: str = ""

    @property
    def gone(self) -> bool:
        """Whether the place will not answer any more."""
        return self.kind in ("silent", "ended")


class Machine(Protocol):
    """The places, as ``harness.preflight.places.Places``."""

    def ask(self, do: str, tasks: Mapping[str, Task], *, limit_s: float) -> dict[str, Answer]:
        """Have several places do one thing at once. ``do``: a check's name, or ``SERVE``."""


class Unmeasurable(Exception):
    """Nothing more can be measured of a check: ``why``, and ``todo``."""

    def __init__(self, why: str, todo: str) -> None:
        super().__init__(why)
        self.why, self.todo = why, todo


class Check(Protocol):
    """One check. ``seconds``: of one measurement, of the CPU and of a GPU; what they cost is in
    docs/health.md.
    """

    name: ClassVar[str]
    seconds: ClassVar[tuple[float, float]]

    def places(self, asking: Asking) -> Sequence[str]:
        """What it has a finding of."""

    def run(self, asking: Asking) -> None:
        """Ask, and add what comes of it to ``asking``. Raises Unmeasurable."""

    def measure(self, task: Task) -> Measured:
        """Measure, in at most about ``task.budget_s`` seconds. Raises RuntimeError or OSError where
        the device fails.
        """


class Asking:
    """``machine``: has a process for each of ``names``, and ``HOST``; ``until_s``: when to end, on
    ``clock``; ``prefix``: of all keys in a store that an earlier one may have used; ``cores``: of
    which each exchange of places of the CPU takes two. Use ``run``; ``findings`` by check and
    place, ``rates``, and ``lost``, places that do not answer any more, grow.
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
        cores: int = 2,
    ) -> None:
        self._machine, self._directory = machine, directory
        self._until_s, self._seed, self._clock = until_s, seed, clock
        self._port: int | None = None
        self._prefix, self._keys = prefix, 0
        self.names, self.cores = list(names), cores
        self.lost: dict[str, str] = {}
        self.findings: dict[tuple[str, str], Finding] = {}
        self.rates: list[Rate] = []

    def run(self, checks: Sequence[Check]) -> None:
        """Do the checks in their order; what there is no time for is unmeasured."""
        for check in checks:
            try:
                check.run(self)
            except Unmeasurable as error:
                for place in check.places(self):
                    self.unmeasured(check, place, error.why, error.todo)

    def add(self, check: Check, place: str, finding: Finding, rates: Sequence[Rate] = ()) -> None:
        """Keep it, unless something was found before."""
        if (check.name, place) not in self.findings:
            self.findings[check.name, place] = replace(finding, check=check.name, place=place)
            self.rates += [replace(rate, check=check.name, place=place) for rate in rates]

    def broken(self, check: Check, place: str, why: str) -> None:
        """A place fails by itself."""
        todo = "take the place out; dmesg and chaos explain say what an XID or a signal means"
        self.add(check, place, Finding(state="unfit", said=why, todo=todo))

    def unmeasured(self, check: Check, place: str, why: str, todo: str = "") -> None:
        """Nothing is known of a place."""
        self.add(check, place, Finding(state="unmeasured", said=why, todo=todo))

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

    def task(self, check: Check, place: str, **options: Any) -> Task:
        """For one place, with the seconds of a check. Raises Unmeasurable."""
        return Task(
            place=place,
            budget_s=min(check.seconds[is_cuda(place)], self.left_s() / 4.0),
            seed=self._seed,
            directory=str(nearest(self._directory)),
            options=options,
        )

    def ask(
        self, check: Check, tasks: Mapping[str, Task], do: str = "", *, more_s: float = 0.0
    ) -> dict[str, Answer]:
        """Answers of places; one that is silent for longer than it may is a finding, unless the
        preflight's own time was shorter. ``more_s``: how long it may wait for others.
        """
        if not tasks:
            return {}
        wanted_s = 5.0 * max(task.budget_s for task in tasks.values()) + GRACE_S + more_s
        left_s = self.left_s()
        answers = self._machine.ask(do or check.name, tasks, limit_s=min(wanted_s, left_s))
        for place, answer in answers.items():
            if answer.gone and place not in self.lost:
                self.lost[place] = answer.error
                killed = answer.kind == "ended" and "signal 9" in answer.error
                if left_s >= wanted_s if answer.kind == "silent" else not killed:
                    self.broken(check, place, answer.error)
        return answers

    def measure(self, check: Check, places: Sequence[str], **options: Any) -> dict[str, Measured]:
        """What places measure at once; of the others there is a finding."""
        for place in places:
            if place in self.lost:
                self.unmeasured(check, place, self.lost[place])
        tasks = {
            place: self.task(check, place, **options) for place in places if place not in self.lost
        }
        measured = {}
        for place, answer in self.ask(check, tasks).items():
            short = answer.kind in SHORT or "allocate memory" in answer.error
            if answer.found is not None:
                measured[place] = answer.found
            elif answer.gone or short:
                self.unmeasured(check, place, answer.error, "free memory" if short else "")
            else:
                self.broken(check, place, f"{answer.kind}: {answer.error}")
        return measured

    def store(self, check: Check) -> dict[str, Any]:
        """Address of the store, which the process of the host serves, or where a disk holds that
        one up, the first place that is left. Raises Unmeasurable.
        """
        if self._port is None:
            alive = [name for name in (HOST, *self.names) if name not in self.lost]
            if not alive:
                raise Unmeasurable("no process is left that could serve a store", "")
            tasks = {alive[0]: self.task(check, alive[0], host=LOOPBACK)}
            answer = self.ask(check, tasks, SERVE)[alive[0]]
            if answer.found is None:
                why = f"no store could be started: {answer.error}"
                raise Unmeasurable(why, f"free a port on {LOOPBACK}")
            self._port = int(answer.found["port"])
        return {"port": self._port, "host": LOOPBACK}


class PlaceCheck(ABC):
    """A check of single places. ``rounds``: measurements of each; ``of_host``: of what all devices
    share.
    """

    name: ClassVar[str]
    seconds: ClassVar[tuple[float, float]]
    rounds: ClassVar[int] = 1
    of_host: ClassVar[bool] = False

    @abstractmethod
    def measure(self, task: Task) -> Measured:
        """As ``Check.measure``."""

    @abstractmethod
    def judge(self, place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
        """What that alone says of the place, and what is to be compared with others. Pure."""

    def options(self, asking: Asking) -> Mapping[str, Any]:
        """Of its tasks."""
        return {}

    def places(self, asking: Asking) -> Sequence[str]:
        """The host, or all."""
        return [HOST] if self.of_host else asking.names

    def run(self, asking: Asking) -> None:
        """All GPUs at once, as in training; places of the CPU share its cores, and take turns."""
        places = self.places(asking)
        turns = [places] if any(map(is_cuda, places)) else [[place] for place in places]
        rounds: dict[str, list[Measured]] = {place: [] for place in places}
        options = self.options(asking)
        try:
            for _ in range(self.rounds):
                for turn in turns:
                    for place, measured in asking.measure(self, turn, **options).items():
                        rounds[place].append(measured)
        finally:  # what was measured before the time was over counts
            for place, measured_of in rounds.items():
                if measured_of:
                    asking.add(self, place, *self.judge(place, measured_of))


def torch_name(place: str) -> str:
    """Torch's name of a place: all places ``cpu:N`` and ``host`` are its ``cpu``."""
    return place if place.startswith("cuda") else "cpu"


def is_cuda(place: str) -> bool:
    """Whether it is an NVIDIA device."""
    return place.startswith("cuda")


def nearest(directory: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    return next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )
