"""A preflight: every place is asked what the checks measure, in a time that is bounded."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.preflight import baseline as baselines
from trainchaos.harness.preflight import compare, exchange, worker
from trainchaos.harness.preflight.bounds import ROUNDS
from trainchaos.harness.preflight.check import Task, is_cuda
from trainchaos.harness.preflight.disk import nearest
from trainchaos.harness.preflight.findings import ALL, HOST, JOIN, Finding, Findings, Rate
from trainchaos.harness.preflight.places import Answer, Order, Places
from trainchaos.harness.preflight.regroup import Pair, find_slow
from trainchaos.recovery.health.statistics.robust import median
from trainchaos.recovery.policy.jobconfig import LOOPBACK

FULL = ("memory", "product", "clocks", "disk", "store", compare.BANDWIDTH, compare.ALL_REDUCE)
QUICK = ("memory", "product")
"""Of a suspect place before it rejoins: what is wrong and not what is slow, as nothing is compared.
"""
RATES = ("clocks", "disk", "store", compare.BANDWIDTH, compare.ALL_REDUCE)
"""Checks that a baseline repeats."""
TOTAL_S, QUICK_S = 60.0, 20.0
CAPS_S: Mapping[str, tuple[float, float]] = {
    "memory": (5.0, 20.0),
    "product": (0.7, 5.0),
    "clocks": (0.6, 3.0),
    "disk": (2.0, 2.0),
    "store": (0.5, 0.5),
    compare.BANDWIDTH: (0.15, 0.5),
    compare.ALL_REDUCE: (0.15, 0.5),
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


class Measurement:
    """One pass over the checks. ``machine``: has a process for each of ``names``, and ``HOST``;
    ``until_s``: when to end, on ``clock``; ``cores``: of which each exchange of a CPU takes two.
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
        cores: int = 2,
        prefix: str = "",
    ) -> None:
        self._machine, self._names, self._directory = machine, list(names), directory
        self._until_s, self._seed, self._clock = until_s, seed, clock
        self._at_once = max(1, cores // 2)
        self._port: int | None = None
        self._prefix, self._groups = prefix, 0
        self._lost: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.rates: list[Rate] = []

    def run(self, checks: Sequence[str]) -> None:
        """Do the checks in their order; what there is no time for is unmeasured."""
        for check in checks:
            try:
                if check == compare.BANDWIDTH:
                    self._pairs()
                elif check == compare.ALL_REDUCE:
                    self._all_reduce()
                elif check in ("disk", "store"):
                    self._each(check, [HOST])
                else:
                    self._each(check, self._names)
            except Unmeasurable as error:
                done = {one.place for one in self.findings if one.check == check}
                for place in self._places_of(check):
                    if place not in done:
                        self._unmeasured(check, place, error.why, error.todo)

    def _places_of(self, check: str) -> list[str]:
        if check in (compare.BANDWIDTH, compare.ALL_REDUCE):
            return [ALL]
        return [HOST] if check in ("disk", "store") else self._names

    def _left_s(self) -> float:
        left_s = self._until_s - self._clock()
        if left_s < LEAST_S:
            raise Unmeasurable("no time was left", "raise --preflight-time")
        return left_s

    def _task(self, check: str, place: str, **options: Any) -> Task:
        budget_s = min(CAPS_S[check][is_cuda(place)], self._left_s() / 4.0)
        return Task(
            place=place,
            budget_s=budget_s,
            seed=self._seed,
            directory=str(nearest(self._directory)),
            options=options,
        )

    def _ask(self, check: str, tasks: Mapping[str, Task], do: str = "") -> dict[str, Answer]:
        """Answers of places; one that is silent for longer than it may is a finding, unless the
        preflight's own time was shorter.
        """
        budget_s = max(task.budget_s for task in tasks.values())
        wanted_s, left_s = 5.0 * budget_s + GRACE_S, self._left_s()
        orders = {place: Order(do=do or check, task=task) for place, task in tasks.items()}
        answers = self._machine.ask(orders, limit_s=min(wanted_s, left_s))
        for place, answer in answers.items():
            if answer.kind in ("silent", "ended") and place not in self._lost:
                self._lost[place] = answer.error
                hurt = (
                    left_s >= wanted_s
                    if answer.kind == "silent"
                    else "signal 9" not in (answer.error)
                )
                if hurt:
                    self._broken(check, place, answer.error)
        return answers

    def _each(self, check: str, places: Sequence[str]) -> None:
        """All GPUs at once, as in training; places of the CPU share its cores, and take turns."""
        cuda = [place for place in places if is_cuda(place)]
        turns = [cuda] if cuda else [[place] for place in places]
        rounds: dict[str, list[Mapping[str, Any]]] = {place: [] for place in places}
        options = self._store() if check == "store" else {}
        for _ in range(ROUNDS if check == "clocks" else 1):
            for turn in turns:
                alive = [place for place in turn if self._alive(check, place)]
                if not alive:
                    continue
                tasks = {place: self._task(check, place, **options) for place in alive}
                for place, answer in self._ask(check, tasks).items():
                    if answer.found is not None:
                        rounds[place].append(answer.found)
                    elif not self._has(check, place):
                        self._failed(check, place, answer)
        one = worker.CHECKS[check]
        for place, found in rounds.items():
            if found and not self._has(check, place):
                measured = {"rounds": found} if check == "clocks" else found[0]
                self.findings.append(one.judge(place, measured))
                self.rates += one.rates(place, measured)

    def _store(self) -> dict[str, Any]:
        """Address of the store, which the process of the host serves, or where a disk holds that
        one up, the first place that is left. Raises Unmeasurable.
        """
        if self._port is None:
            alive = [name for name in (HOST, *self._names) if name not in self._lost]
            if not alive:
                raise Unmeasurable("no process is left that could serve a store", "")
            task = self._task("store", alive[0], host=LOOPBACK)
            answer = self._ask("store", {alive[0]: task}, worker.SERVE)[alive[0]]
            if answer.found is None:
                why = f"no store could be started: {answer.error}"
                raise Unmeasurable(why, f"free a port on {LOOPBACK}")
            self._port = int(answer.found["port"])
        return {"port": self._port, "host": LOOPBACK}

    def _pairs(self) -> None:
        names = [name for name in self._names if name not in self._lost]
        if len(names) < 2:
            self._unmeasured(compare.BANDWIDTH, ALL, "it takes two places", "")
            return
        errors: dict[Pair, str] = {}

        def measure(pairs: Sequence[Pair]) -> dict[Pair, list[float]]:
            found: dict[Pair, list[float]] = {pair: [] for pair in pairs}
            at_once = len(pairs) if is_cuda(names[0]) else self._at_once
            for _ in range(ROUNDS):  # round by round, so that a disturbance is in all pairs alike
                for at in range(0, len(pairs), at_once):
                    for pair, rate in self._exchange(pairs[at : at + at_once], errors).items():
                        found[pair].append(rate)
            return found

        regrouped = find_slow(names, measure)
        self.findings += compare.of_pairs(regrouped, errors)
        for pair, rounds in regrouped.pairs.items():
            if pair not in errors:
                todo = "look for what shares the link; --format json has all pairs"
                self.rates.append(
                    Rate(
                        check=compare.BANDWIDTH,
                        metric="pair",
                        place=JOIN.join(pair),
                        rounds=rounds,
                        unit=compare.MIBS,
                        todo=todo,
                    )
                )

    def _exchange(
        self, groups: Sequence[Sequence[str]], errors: dict[Any, str], kind: str = "pair"
    ) -> dict[Any, float]:
        """One round of disjoint groups at once: the rate of each, 0 with a reason in ``errors``."""
        check = compare.BANDWIDTH if kind == "pair" else compare.ALL_REDUCE
        store = self._store()
        tasks = {}
        for members in groups:
            self._groups += 1
            prefix = f"{self._prefix}group-{self._groups}"
            for rank, place in enumerate(members):
                tasks[place] = self._task(
                    check, place, **store, rank=rank, world=len(members), prefix=prefix,
                    kind=kind, timeout_s=min(GRACE_S, self._left_s()),
                )  # fmt: skip
        answers = self._ask(check, tasks, worker.EXCHANGE)
        rates = {}
        for members in groups:
            mine = {place: answers[place] for place in members}
            bad = [f"{place}: {one.error}" for place, one in mine.items() if one.found is None]
            if bad:
                self._left_s()  # an exchange that the end of the time broke off says nothing
                rates[members] = 0.0
                errors[members] = f"no exchange ({bad[0]})"
                continue
            found = {place: one.found for place, one in mine.items() if one.found is not None}
            rate, wrong = exchange.merged(found)
            if wrong:
                errors[members] = f"{wrong} exchanges did not arrive as they were sent"
            rates[members] = 0.0 if wrong else rate
        return rates

    def _all_reduce(self) -> None:
        names = tuple(name for name in self._names if name not in self._lost)
        check = compare.ALL_REDUCE
        if len(names) < 2:
            self._unmeasured(check, ALL, "it takes two places", "")
            return
        errors: dict[Any, str] = {}
        rounds = [self._exchange([names], errors, "all")[names] for _ in range(ROUNDS)]
        rate = median(rounds)
        if errors:
            self.findings.append(
                Finding(
                    check=check,
                    place=ALL,
                    state="unfit",
                    said=errors[names],
                    unit=compare.MIBS,
                    measured=rate,
                    todo="the finding of a place or pair says which, if one is to"
                    " blame; NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO says more",
                )
            )
            return
        said = f"{rate:.0f} MiB/s of bus bandwidth, {len(names)} places, sums exact"
        self.findings.append(
            Finding(
                check=check, place=ALL, state="fit", said=said, measured=rate, unit=compare.MIBS
            )
        )
        self.rates.append(
            Rate(
                check=check,
                metric="all",
                place=ALL,
                rounds=rounds,
                unit=compare.MIBS,
                todo="look at the pairs: the slowest place holds all up",
            )
        )

    def _alive(self, check: str, place: str) -> bool:
        if place in self._lost and not self._has(check, place):
            self._unmeasured(check, place, self._lost[place], "")
        return place not in self._lost

    def _has(self, check: str, place: str) -> bool:
        return any((one.check, one.place) == (check, place) for one in self.findings)

    def _failed(self, check: str, place: str, answer: Answer) -> None:
        """Of an answer that is an error."""
        short = answer.kind in SHORT or "allocate memory" in answer.error
        if answer.kind in ("silent", "ended") or short:
            self._unmeasured(check, place, answer.error, "free memory" if short else "")
        else:
            self._broken(check, place, f"{answer.kind}: {answer.error}")

    def _broken(self, check: str, place: str, why: str) -> None:
        todo = "take the place out; dmesg and chaos explain say what an XID or a signal means"
        self.findings.append(Finding(check=check, place=place, state="unfit", said=why, todo=todo))

    def _unmeasured(self, check: str, place: str, why: str, todo: str) -> None:
        self.findings.append(
            Finding(check=check, place=place, state="unmeasured", said=why, todo=todo)
        )


def preflight(
    names: Sequence[str],
    directory: Path,
    *,
    total_s: float = TOTAL_S,
    checks: Sequence[str] = FULL,
    seed: int = 0,
    baseline: baselines.Baseline | None = None,
    repeats: int = 1,
) -> tuple[Findings, list[list[Rate]]]:
    """Measure the places within ``total_s`` seconds, and up to 25 more to end a process that the
    kernel does not let go; compare with peers and with a baseline. ``repeats``: of the rates, for a
    new baseline; the rates of each are returned too. Every process is gone afterwards, also after
    an exception such as KeyboardInterrupt.
    """
    began_s = time.monotonic()
    here = baselines.hardware(names)
    repeated: list[list[Rate]] = []
    try:
        places = Places([*names, HOST], limit_s=total_s)
    except InfrastructureError as error:
        lost = Finding(check="start", place=HOST, state="unmeasured", said=error.message)
        return Findings(findings=[replace(lost, todo=error.hint)], hardware=here), repeated
    stay: list[str] = []
    try:
        findings: list[Finding] = []
        for turn in range(repeats):
            now_s = time.monotonic()
            until_s = now_s + (began_s + total_s - now_s) / (repeats - turn)
            one = Measurement(
                places, names, directory, until_s=until_s, seed=seed, prefix=f"pass-{turn}/",
                cores=len(os.sched_getaffinity(0)),
            )  # fmt: skip
            one.run([check for check in checks if turn == 0 or check in RATES])
            rates = one.rates
            repeated.append(rates)
            compared = compare.with_peers(one.findings, rates)
            findings += compared if turn == 0 else [two for two in compared if two.state == "unfit"]
    finally:
        stay = places.close()
    if baseline is not None:
        findings = compare.with_baseline(findings, repeated[0], baseline)
    for name in stay:
        said = "its process cannot be ended: the kernel waits for its device or disk"
        findings.append(Finding(check="end", place=name, state="unfit", said=said))
    rates = repeated[0]
    seconds = time.monotonic() - began_s
    return Findings(findings=findings, rates=rates, hardware=here, seconds=seconds), repeated


def fit(
    place: str,
    checks: Sequence[str] = QUICK,
    *,
    directory: Path = Path("."),
    total_s: float = QUICK_S,
    seed: int = 0,
) -> Findings:
    """Whether one place (``cpu:2``, ``cuda:0``) is fit, in a few seconds: for a process on a
    suspect place, before it rejoins. Nothing is compared, and ``Findings.fit`` is false if nothing
    could be measured. The place must have memory free for it: a share of a GPU's free memory is
    taken. Raises ValueError for a check that there is not.
    """
    unknown = [check for check in checks if check not in FULL]
    if unknown or not math.isfinite(total_s):
        raise ValueError(
            f"no such check: {', '.join(unknown)}" if unknown else "total_s is no time"
        )
    return preflight([place], directory, total_s=total_s, checks=checks, seed=seed)[0]
