"""A preflight: every place is asked what the checks measure, in a time that is bounded."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.preflight import baseline as baselines
from trainchaos.harness.preflight import compare, worker
from trainchaos.harness.preflight.asking import GRACE_S, Asking, Unmeasurable
from trainchaos.harness.preflight.checks import exchange
from trainchaos.harness.preflight.checks.bounds import ROUNDS
from trainchaos.harness.preflight.checks.check import is_cuda
from trainchaos.harness.preflight.checks.findings import ALL, HOST, JOIN, Finding, Findings, Rate
from trainchaos.harness.preflight.places import Places
from trainchaos.harness.preflight.regroup import Measure, Pair, find_slow
from trainchaos.recovery.health.statistics.robust import median

QUICK = ("memory", "product")
"""Of a suspect place before it rejoins: what is wrong and not what is slow, as nothing is compared.
"""
RATES = ("clocks", "disk", "store", compare.BANDWIDTH, compare.ALL_REDUCE)
"""Checks that a baseline repeats."""
TOTAL_S, QUICK_S = 60.0, 20.0
FULL = ("memory", "product", "clocks", "disk", "store", compare.BANDWIDTH, compare.ALL_REDUCE)
TIMEOUT_S = 5.0
"""Of forming a group, and of each exchange in it: a member waits so long for one that hangs."""
WRONG = "exchanges did not arrive as they were sent"
TWO = "it takes two places"


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
                places,
                names,
                directory,
                until_s=until_s,
                seed=seed,
                prefix=f"pass-{turn}/",
            )
            wanted = [check for check in checks if turn == 0 or check in RATES]
            one.run(wanted, cores=len(os.sched_getaffinity(0)))
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


class Measurement(Asking):
    """Use ``run``; ``findings`` and ``rates`` grow."""

    def run(self, checks: Sequence[str], *, cores: int = 2) -> None:
        """Do the checks in their order; what there is no time for is unmeasured. ``cores``: of
        which each exchange of places of the CPU takes two.
        """
        exchanges = Exchanges(self, at_once=max(1, cores // 2))
        for check in checks:
            try:
                if check == compare.BANDWIDTH:
                    exchanges.pairs()
                elif check == compare.ALL_REDUCE:
                    exchanges.all_reduce()
                else:
                    self._each(check, self._places_of(check))
            except Unmeasurable as error:
                for place in self._places_of(check):
                    if not self.has(check, place):
                        self.unmeasured(check, place, error.why, error.todo)

    def _places_of(self, check: str) -> list[str]:
        if check in (compare.BANDWIDTH, compare.ALL_REDUCE):
            return [ALL]
        return [HOST] if check in ("disk", "store") else self.names

    def _each(self, check: str, places: Sequence[str]) -> None:
        """All GPUs at once, as in training; places of the CPU share its cores, and take turns."""
        cuda = [place for place in places if is_cuda(place)]
        turns = [cuda] if cuda else [[place] for place in places]
        rounds: dict[str, list[Mapping[str, Any]]] = {place: [] for place in places}
        options = self.store() if check == "store" else {}
        try:
            for _ in range(ROUNDS if check == "clocks" else 1):
                for turn in turns:
                    self._take_turn(check, turn, options, rounds)
        finally:  # what was measured before the time was over counts
            one = worker.CHECKS[check]
            for place, found in rounds.items():
                if found and not self.has(check, place):
                    measured = {"rounds": found} if check == "clocks" else found[0]
                    self.findings.append(one.judge(place, measured))
                    self.rates += one.rates(place, measured)

    def _take_turn(
        self,
        check: str,
        places: Sequence[str],
        options: Mapping[str, Any],
        rounds: Mapping[str, list[Mapping[str, Any]]],
    ) -> None:
        for place in places:
            if place in self.lost and not self.has(check, place):
                self.unmeasured(check, place, self.lost[place], "")
        tasks = {
            place: self.task(check, place, **options) for place in places if place not in self.lost
        }
        for place, answer in (self.ask(check, tasks) if tasks else {}).items():
            if answer.found is not None:
                rounds[place].append(answer.found)
            elif not self.has(check, place):
                self.failed(check, place, answer)


class Exchanges:
    """``asking``: has the places, and keeps what is found; ``at_once``: pairs of places of the CPU
    that exchange at the same time (all pairs of GPUs do).
    """

    def __init__(self, asking: Asking, *, at_once: int) -> None:
        self._asking, self._at_once = asking, at_once

    def pairs(self) -> None:
        """Find slow places and links by regrouping. Raises Unmeasurable."""
        asking, check = self._asking, compare.BANDWIDTH
        names = asking.living()
        if len(names) < 2:
            asking.unmeasured(check, ALL, TWO, "")
            return
        errors: dict[Any, str] = {}
        try:
            regrouped = find_slow(names, self._measure(is_cuda(names[0]), errors))
        except BaseException:  # the time is over; what arrived wrong is wrong nevertheless
            for pair, why in errors.items():
                if WRONG in why:
                    asking.broken(check, JOIN.join(pair), why)
            raise
        rows = compare.of_pairs(regrouped, errors)
        asking.findings += [row for row in rows if not asking.has(check, row.place)]
        todo = "look for what shares the link; --format json has all pairs"
        for pair, rounds in regrouped.pairs.items():
            if pair not in errors:
                asking.rates.append(
                    Rate(
                        check=check,
                        metric="pair",
                        place=JOIN.join(pair),
                        rounds=rounds,
                        unit=compare.MIBS,
                        todo=todo,
                    )
                )

    def all_reduce(self) -> None:
        """All places together. Raises Unmeasurable."""
        asking, check = self._asking, compare.ALL_REDUCE
        names = tuple(asking.living())
        if len(names) < 2:
            asking.unmeasured(check, ALL, TWO, "")
            return
        errors: dict[Any, str] = {}
        rounds: list[float] = []
        try:
            for _ in range(ROUNDS):
                rounds.append(self._round([names], errors, "all")[names])
        finally:
            if errors:
                todo = (
                    "the finding of a place or pair says which, if one is to blame;"
                    " NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO says more"
                )
                asking.findings.append(
                    Finding(check=check, place=ALL, state="unfit", said=errors[names], todo=todo)
                )
        if errors:
            return
        rate = median(rounds)
        said = f"{rate:.0f} MiB/s of bus bandwidth, {len(names)} places, sums exact"
        asking.findings.append(
            Finding(
                check=check, place=ALL, state="fit", said=said, measured=rate, unit=compare.MIBS
            )
        )
        todo = "look at the pairs: the slowest place holds all up"
        asking.rates.append(
            Rate(check=check, metric="all", place=ALL, rounds=rounds, unit=compare.MIBS, todo=todo)
        )

    def _measure(self, cuda: bool, errors: dict[Any, str]) -> Measure:
        """Round by round, so that a disturbance is in all pairs alike."""

        def measure(pairs: Sequence[Pair]) -> dict[Pair, list[float]]:
            found: dict[Pair, list[float]] = {pair: [] for pair in pairs}
            at_once = len(pairs) if cuda else self._at_once
            for _ in range(ROUNDS):
                for at in range(0, len(pairs), at_once):
                    for pair, rate in self._round(pairs[at : at + at_once], errors).items():
                        found[pair].append(rate)
            return found

        return measure

    def _round(
        self, groups: Sequence[Sequence[str]], errors: dict[Any, str], kind: str = "pair"
    ) -> dict[Any, float]:
        """Disjoint groups at once: the rate of each, 0 with a reason in ``errors``."""
        asking = self._asking
        check = compare.BANDWIDTH if kind == "pair" else compare.ALL_REDUCE
        store = asking.store()
        rates: dict[Any, float] = {}
        tasks = {}
        for members in groups:
            gone = [f"{place}: {asking.lost[place]}" for place in members if place in asking.lost]
            if gone:  # nobody need wait for it
                rates[members] = 0.0
                errors[members] = f"no exchange ({gone[0]})"
                continue
            key = asking.key()
            for rank, place in enumerate(members):
                tasks[place] = asking.task(
                    check,
                    place,
                    **store,
                    rank=rank,
                    world=len(members),
                    prefix=key,
                    kind=kind,
                    timeout_s=min(TIMEOUT_S, asking.left_s()),
                )
        # Whoever waits for a member that hangs answers only after its own timeouts.
        answers = asking.ask(check, tasks, worker.EXCHANGE, more_s=GRACE_S) if tasks else {}
        for members in groups:
            if members in rates:
                continue
            mine = {place: answers[place] for place in members}
            found = {place: one.found for place, one in mine.items() if one.found is not None}
            if len(found) < len(mine):
                asking.left_s()  # an exchange that the end of the time broke off says nothing
                lost = sorted(
                    (one.kind not in ("silent", "ended"), f"{place}: {one.error}")
                    for place, one in mine.items()
                    if one.found is None
                )
                rates[members] = 0.0
                errors[members] = f"no exchange ({lost[0][1]})"
                continue
            rate, wrong = exchange.merged(found)
            rates[members] = 0.0 if wrong else rate
            if wrong:
                errors[members] = f"{wrong} {WRONG}"
        return rates
