"""What a check is: it asks places to measure within a time, and says what that means, in findings,
rates that are compared, and reasons for a taint.

``Check.measure`` runs in a place's own process, all else in the one that asks. A check of single
places is a ``PlaceCheck``: a measurement, and a judgement over what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from trainchaos.chaos import errors
from trainchaos.recovery.health.taints import MAX_TEXT, Taint
from trainchaos.recovery.policy.jobconfig import LOOPBACK

State = Literal["fit", "unfit", "unmeasured"]
HOST = "host"
"""The place of what all devices share: disk, store."""
ALL = "all"
"""The place of what all places do together."""
JOIN = "+"
"""Between the two places of a pair: ``cpu:0+cpu:1``."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check of one place. ``said``: what was measured; ``todo``: what to do, "" where nothing
    is; ``measured``, ``bound``: in ``unit``, where one number decided; ``evidence``: JSON. Who asks
    for a check fills in ``check`` and ``place``.
    """

    check: str = ""
    place: str = ""
    state: State = "fit"
    said: str
    todo: str = ""
    measured: float | None = None
    bound: float | None = None
    unit: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A quantity of a place that is compared with peers and with a baseline. ``rounds``: values of
    successive rounds, in ``unit``; ``high_is_good``: false of latencies; ``peers``: whether places
    of one machine should be alike in it.
    """

    check: str = ""
    metric: str
    place: str = ""
    rounds: Sequence[float]
    unit: str
    high_is_good: bool = True
    peers: bool = False
    todo: str = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All of one preflight. ``hardware``: as in a baseline; ``rates``: what was compared;
    ``seconds``: it took.
    """

    findings: Sequence[Finding]
    rates: Sequence[Rate] = ()
    hardware: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def unfit(self) -> list[Finding]:
        """Those that failed."""
        return [one for one in self.findings if one.state == "unfit"]

    @property
    def fit(self) -> bool:
        """Whether something was measured and nothing failed."""
        return self.exit_code == errors.EXIT_PASS

    @property
    def exit_code(self) -> int:
        """0 fit, 1 something is unfit, 7 nothing could be measured."""
        if self.unfit:
            return errors.EXIT_FAIL
        measured = any(one.state == "fit" for one in self.findings)
        return errors.EXIT_PASS if measured else errors.EXIT_SKIPPED

    def as_json(self) -> dict[str, Any]:
        """For ``--format json``."""
        whole = asdict(self)
        return {
            "schema_version": 1,
            "fit": self.fit,
            "seconds": round(self.seconds, 3),
            **{name: whole[name] for name in ("hardware", "findings", "rates")},
        }


def as_taints(findings: Iterable[Finding], host: str, now: datetime) -> list[Taint]:
    """What failed on a host, for the list of tainted places (``recovery.health.taints``), at
    ``now`` (UTC).

    Of a slow pair whose members are good with others, the second is named: a job without it does
    not use the link, and that both are refused would cost a good device. What all places do
    together names no place, so it taints none.
    """
    taints = []
    for one in findings:
        if one.state != "unfit" or one.place == ALL:
            continue
        first, _, second = one.place.partition(JOIN)
        said = f"preflight {one.check}: {one.said}"
        reason = "".join(char if char.isprintable() else " " for char in said)
        facts = {name: getattr(one, name) for name in ("measured", "check", "place", "unit")}
        facts["bound"] = one.bound
        taint = {
            **({"node": host} if one.place == HOST else {"device": f"{host}/{second or first}"}),
            "reason": reason if len(reason) <= MAX_TEXT else f"{reason[: MAX_TEXT - 3]}...",
            "since": now,
            "evidence": {name: value for name, value in facts.items() if value is not None},
            "by": "preflight",
        }
        taints.append(Taint.model_validate(taint))
    return taints


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
    docs/health.md. ``measure``: in at most about ``Task.budget_s`` seconds; raises RuntimeError or
    OSError where the device fails.
    """

    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> tuple[float, float]: ...

    @property
    def measure(self) -> Callable[[Task], Measured]: ...

    def places(self, asking: Asking) -> Sequence[str]:
        """What it has a finding of."""

    def run(self, asking: Asking) -> None:
        """Ask, and add what comes of it to ``asking``. Raises Unmeasurable."""


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


@dataclass(frozen=True, kw_only=True)
class PlaceCheck:
    """A check of single places. ``judge``: what measurements alone say of a place, and what is to
    be compared with others; ``rounds``: measurements of each; ``of_host``: of what all devices
    share; ``stored``: its tasks say where the store is.
    """

    name: str
    seconds: tuple[float, float]
    measure: Callable[[Task], Measured]
    judge: Callable[[str, Sequence[Measured]], tuple[Finding, Sequence[Rate]]]
    rounds: int = 1
    of_host: bool = False
    stored: bool = False

    def places(self, asking: Asking) -> Sequence[str]:
        """The host, or all."""
        return [HOST] if self.of_host else asking.names

    def run(self, asking: Asking) -> None:
        """All GPUs at once, as in training; places of the CPU share its cores, and take turns."""
        places = self.places(asking)
        turns = [places] if any(map(is_cuda, places)) else [[place] for place in places]
        rounds: dict[str, list[Measured]] = {place: [] for place in places}
        options = asking.store(self) if self.stored else {}
        try:
            for _ in range(self.rounds):
                for turn in turns:
                    for place, measured in asking.measure(self, turn, **options).items():
                        rounds[place].append(measured)
        finally:  # what was measured before the time was over counts
            for place, measured_of in rounds.items():
                if measured_of:
                    asking.add(self, place, *self.judge(place, measured_of))


def is_cuda(place: str) -> bool:
    """Whether it is an NVIDIA device."""
    return place.startswith("cuda")


def nearest(directory: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    return next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )
