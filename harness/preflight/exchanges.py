"""Bandwidth between pairs of places, and of all together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainchaos.harness.preflight import compare, worker
from trainchaos.harness.preflight.asking import GRACE_S, Asking
from trainchaos.harness.preflight.checks import exchange
from trainchaos.harness.preflight.checks.bounds import ROUNDS
from trainchaos.harness.preflight.checks.check import is_cuda
from trainchaos.harness.preflight.checks.findings import ALL, JOIN, Finding, Rate
from trainchaos.harness.preflight.regroup import Measure, Pair, find_slow
from trainchaos.recovery.health.statistics.robust import median

TIMEOUT_S = 5.0
"""Of forming a group, and of each exchange in it: a member waits so long for one that hangs."""
WRONG = "exchanges did not arrive as they were sent"
TWO = "it takes two places"


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
