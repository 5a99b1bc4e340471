"""What rates say: beside peers of this machine, and beside a baseline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainchaos.harness.preflight.baseline import Baseline, BaselineRate
from trainchaos.harness.preflight.checks.bounds import baseline_limit, log, slow_among
from trainchaos.harness.preflight.checks.check import is_cuda
from trainchaos.harness.preflight.checks.findings import HOST, JOIN, Finding, Rate, State
from trainchaos.harness.preflight.regroup import Regrouped, Slow
from trainchaos.recovery.health.statistics.robust import median

BANDWIDTH, ALL_REDUCE = "bandwidth", "all-reduce"
MIBS = "MiB/s"


def with_peers(findings: Sequence[Finding], rates: Sequence[Rate]) -> list[Finding]:
    """The findings, with those places unfit that are slow among the places of this machine."""
    alike: dict[tuple[str, str], list[Rate]] = defaultdict(list)
    for rate in rates:
        if rate.peers:
            alike[rate.check, rate.metric].append(rate)
    found = list(findings)
    for group in alike.values():
        compared = slow_among({one.place: one.rounds for one in group})
        for rate in group:
            beside = compared.get(rate.place)
            if beside is None or not beside.slow:
                continue
            value = median(rate.rounds)
            peers = value / beside.ratio if beside.ratio > 0.0 else math.inf
            bound = peers * beside.bound
            said = (
                f"{rate.metric} {_number(value, rate.unit)}, its peers"
                f" {_number(peers, rate.unit)}, at least {_number(bound, rate.unit)}"
            )
            found = _failed(found, rate, said, value, bound)
    return found


def with_baseline(
    findings: Sequence[Finding], rates: Sequence[Rate], baseline: Baseline
) -> list[Finding]:
    """The findings, with those places unfit that are worse than the baseline allows; without
    anything in common, a finding that says so.
    """
    pairs = [(rate, was) for rate in rates if (was := baseline.find(rate)) is not None]
    found = list(findings)
    if not pairs:
        return [
            *found,
            Finding(
                check="baseline",
                place=HOST,
                state="unmeasured",
                said="the baseline has no rate of what was measured here",
                todo="save another with --save-baseline",
            ),
        ]
    for rate, was in pairs:
        value = median(rate.rounds)
        bound = bound_of(was, len(pairs))
        if (value >= bound) if rate.high_is_good else (value <= bound):
            continue
        side = "at least" if rate.high_is_good else "at most"
        said = (
            f"{rate.metric} {_number(value, rate.unit)}, in the baseline"
            f" {_number(median(was.values), rate.unit)}, {side} {_number(bound, rate.unit)}"
        )
        found = _failed(found, rate, said, value, bound)
    return found


def bound_of(was: BaselineRate, comparisons: int) -> float:
    """What a rate must reach, or not exceed, beside a baseline (``bounds.baseline_limit``)."""
    level, limit = baseline_limit(was.values, comparisons, latency=not was.high_is_good)
    return math.exp(level - limit if was.high_is_good else level + limit)


def of_pairs(regrouped: Regrouped, errors: Mapping[tuple[str, str], str]) -> list[Finding]:
    """One finding a pair, and one for each slow place or link. ``errors``: why pairs could not
    exchange, or got wrong bytes.
    """
    found = []
    for pair, rounds in regrouped.pairs.items():
        clear = pair not in errors and pair not in regrouped.unclear
        state: State = "fit" if clear else "unmeasured"
        said = errors.get(pair) or f"{median(rounds):.0f} MiB/s"
        blamed = [place for place in pair if place in regrouped.places]
        if pair in regrouped.links:
            continue
        if blamed:
            state, said = "unmeasured", f"{said}; {' and '.join(blamed)} is to blame"
        elif pair in errors:
            state = "unfit"  # wrong or no data is no matter of peers
        elif pair in regrouped.unclear:
            said += ", slow once and not again, or among too few good pairs"
        found.append(
            Finding(
                check=BANDWIDTH,
                place=JOIN.join(pair),
                state=state,
                said=said,
                unit=MIBS,
                measured=median(rounds),
                todo=_link_todo(pair) if state == "unfit" else "",
            )
        )
    for pair, said in errors.items():
        blamed = [place for place in pair if place in regrouped.places]
        if pair not in regrouped.pairs and not blamed:  # one that was tried later
            found.append(
                Finding(
                    check=BANDWIDTH,
                    place=JOIN.join(pair),
                    state="unfit",
                    said=said,
                    todo=_link_todo(pair),
                )
            )
    for place, slow in regrouped.places.items():
        found.append(_slow(place, slow, errors, _place_todo(place)))
    for pair, slow in regrouped.links.items():
        found.append(_slow(JOIN.join(pair), slow, errors, _link_todo(pair)))
    return found


def _slow(place: str, slow: Slow, errors: Mapping[tuple[str, str], str], todo: str) -> Finding:
    tried = ", ".join(JOIN.join(pair) for pair in slow.tried)
    said = f"{slow.rate:.0f} MiB/s in {tried}; good pairs {slow.reference:.0f} MiB/s, at least"
    said += f" {slow.bound:.0f} MiB/s"
    why = [errors[pair] for pair in slow.tried if pair in errors]
    said += f" ({why[0]})" if why else ""
    return Finding(
        check=BANDWIDTH,
        place=place,
        state="unfit",
        said=said,
        todo=todo,
        measured=slow.rate,
        bound=slow.bound,
        unit=MIBS,
        evidence={"pairs": [list(pair) for pair in slow.tried]},
    )


def _place_todo(place: str) -> str:
    if is_cuda(place):
        return "take the device out; nvidia-smi nvlink -e and topo -m say what its links do"
    return "take the place out; see what else runs on its cores (top), and what limits its process"


def _link_todo(pair: tuple[str, str]) -> str:
    if is_cuda(pair[0]):
        return "place no ring over this link; nvidia-smi topo -m and nvlink -e say what it is"
    return "place the two on other cores; see what is between them"


def _failed(
    findings: Sequence[Finding], rate: Rate, said: str, value: float, bound: float
) -> list[Finding]:
    """With the finding of that check and place unfit for it; what failed before stays first."""
    found, named = [], False
    for one in findings:
        if (one.check, one.place) == (rate.check, rate.place) and not named:
            named = True
            if one.state == "unfit":
                found.append(replace(one, said=f"{one.said}; {said}"))
            else:
                found.append(
                    replace(
                        one,
                        state="unfit",
                        said=said,
                        todo=rate.todo,
                        measured=value,
                        bound=bound,
                        unit=rate.unit,
                        evidence={**one.evidence, "rounds": list(rate.rounds)},
                    )
                )
        else:
            found.append(one)
    if not named:
        found.append(
            Finding(
                check=rate.check,
                place=rate.place,
                state="unfit",
                said=said,
                todo=rate.todo,
                measured=value,
                bound=bound,
                unit=rate.unit,
                evidence={"rounds": list(rate.rounds)},
            )
        )
    return found


def _number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if abs(log(abs(value))) < 6.9 else f"{value:.0f} {unit}"
