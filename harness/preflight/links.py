"""What two places, or all, exchange in a process group: how fast, whether it arrives, and which
place or link is to blame where it does not.

Measured in the processes of the places: gloo between places of the CPU, NCCL where each place is a
GPU of its own. The bus bandwidth of an all-reduce is 2 (n - 1) / n times its size over its time
(nccl-tests, doc/PERFORMANCE.md), so that it can be compared whatever n is.

Disjoint pairs are measured first, each place in one of them. If one is slow among its peers, all
places are paired anew, twice: who was slow and is slow with each new partner is the slow place. If
neither of a pair is, the pair is measured again: then it is the link between them. A disturbance
that passes is found by none of these. DLRover checks nodes so before it trains (its "Introduction
to Check the Node Healthy"); the second new partner and the repeat of the pair are added here,
against false alarms.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from trainchaos.harness.launch.devices import torch_name
from trainchaos.harness.preflight.check import (
    ALL,
    GRACE_S,
    JOIN,
    Asking,
    Finding,
    Measured,
    Rate,
    Task,
    is_cuda,
)
from trainchaos.harness.preflight.checks import connect
from trainchaos.harness.preflight.compare import ROUNDS, confirming_limit, log, slow_among
from trainchaos.recovery.health.estimates import median

PAIR_BYTES = 4 << 20
CUDA_BYTES = 64 << 20
"""Of one exchange: what DistributedDataParallel sends in one bucket is 25 MiB; less than a link's
latency-bound sizes would not show its bandwidth.
"""
LEAST_REPEATS, MOST_REPEATS = 2, 64
LOOK_S = 0.0001
"""Between two looks at NCCL's operation: small beside the milliseconds that an exchange takes."""
MODULUS = 1009
"""Values are whole numbers below it, so that a sum of up to 16,000 ranks is exact in float32."""
TIMEOUT_S = 5.0
"""Of forming a group, and of each exchange in it: a member waits so long for one that hangs."""
MIBS = "MiB/s"
WRONG = "exchanges did not arrive as they were sent"
TWO = "it takes two places"

Pair = tuple[str, str]
Measure = Callable[[Sequence[Pair]], Mapping[Pair, Sequence[float]]]
"""Of disjoint pairs: rates of each, round by round, high is good; a pair that could not exchange is
missing, or has zeros.
"""


class _Exchange(ABC):
    """What both checks share: groups of places exchange at once, each in a process group."""

    name: ClassVar[str]
    kind: ClassVar[str]
    seconds: ClassVar = (0.1, 0.5)

    def places(self, asking: Asking) -> Sequence[str]:
        return [ALL]

    def measure(self, task: Task) -> Measured:
        return measure(task)

    @abstractmethod
    def run(self, asking: Asking) -> None:
        """As ``Check.run``."""

    def round(
        self, asking: Asking, groups: Sequence[tuple[str, ...]], errors: dict[Any, str]
    ) -> dict[Any, float]:
        """Disjoint groups at once: the rate of each, 0 with a reason in ``errors``."""
        store = asking.store(self)
        tasks: dict[str, Task] = {}
        for members in groups:
            if any(place in asking.lost for place in members):
                continue  # nobody need wait for it
            options = {**store, "prefix": asking.key(), "world": len(members), "kind": self.kind}
            options["timeout_s"] = min(TIMEOUT_S, asking.left_s())
            for rank, place in enumerate(members):
                tasks[place] = asking.task(self, place, rank=rank, **options)
        before = dict(asking.lost)
        # Whoever waits for a member that hangs answers only after its own timeouts.
        answers = asking.ask(self, tasks, more_s=GRACE_S)
        rates: dict[Any, float] = {}
        for members in groups:
            why = [(False, f"{place}: {before[place]}") for place in members if place in before]
            mine = {place: answers[place] for place in members if place in answers}
            if not why and (
                why := [
                    (not one.gone, f"{place}: {one.error}")
                    for place, one in mine.items()
                    if one.found is None
                ]
            ):
                asking.left_s()  # an exchange that the end of the time broke off says nothing
            found = [one.found for one in mine.values() if one.found is not None]
            wrong = sum(int(one["wrong"]) for one in found)
            if why or wrong:
                rates[members] = 0.0
                errors[members] = f"no exchange ({min(why)[1]})" if why else f"{wrong} {WRONG}"
            else:
                rates[members] = min(float(one["rate"]) for one in found)
        return rates


class Bandwidth(_Exchange):
    """Pairs of places."""

    name: ClassVar = "bandwidth"
    kind: ClassVar = "pair"

    def run(self, asking: Asking) -> None:
        """Find slow places and links by pairing anew."""
        names = asking.living()
        if len(names) < 2:
            asking.unmeasured(self, ALL, TWO)
            return
        errors: dict[Any, str] = {}
        at_once = len(names) if is_cuda(names[0]) else max(1, asking.cores // 2)

        def measure_pairs(pairs: Sequence[Pair]) -> dict[Pair, list[float]]:
            """Round by round, so that a disturbance is in all pairs alike."""
            rates: dict[Pair, list[float]] = {pair: [] for pair in pairs}
            for _ in range(ROUNDS):
                for at in range(0, len(pairs), at_once):
                    for pair, rate in self.round(asking, pairs[at : at + at_once], errors).items():
                        rates[pair].append(rate)
            return rates

        try:
            regrouped = find_slow(names, measure_pairs)
        except BaseException:  # the time is over; what arrived wrong is wrong nevertheless
            for pair, why in errors.items():
                if WRONG in why:
                    asking.broken(self, JOIN.join(pair), why)
            raise
        todo = "look for what shares the link; --format json has all pairs"
        for place, finding in explained(regrouped, errors).items():
            rates = [
                Rate(metric="pair", rounds=rounds, unit=MIBS, todo=todo)
                for pair, rounds in regrouped.pairs.items()
                if JOIN.join(pair) == place and pair not in errors
            ]
            asking.add(self, place, finding, rates)


class AllReduce(_Exchange):
    """All places together."""

    name: ClassVar = "all-reduce"
    kind: ClassVar = "all"

    def run(self, asking: Asking) -> None:
        """In one group, round by round."""
        names = tuple(asking.living())
        if len(names) < 2:
            asking.unmeasured(self, ALL, TWO)
            return
        errors: dict[Any, str] = {}
        rounds: list[float] = []
        try:
            for _ in range(ROUNDS):
                rounds.append(self.round(asking, [names], errors)[names])
        finally:
            if errors:
                todo = (
                    "the finding of a place or pair says which, if one is to blame;"
                    " NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO says more"
                )
                asking.add(self, ALL, Finding(state="unfit", said=errors[names], todo=todo))
        rate = median(rounds)
        said = f"{rate:.0f} MiB/s of bus bandwidth, {len(names)} places, sums exact"
        todo = "look at the pairs: the slowest place holds all up"
        asking.add(
            self,
            ALL,
            Finding(said=said, measured=rate, unit=MIBS),
            [Rate(metric="all", rounds=rounds, unit=MIBS, todo=todo)],
        )


# --- which place, or which link, is slow


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A slow place or link. ``rate``: median of the pairs that say so, ``tried``; ``reference``:
    median of good pairs; ``bound``: what it should have reached.
    """

    rate: float
    reference: float
    bound: float
    tried: Sequence[Pair]


@dataclass(kw_only=True)
class Regrouped:
    """``pairs``: rates of the first pairs; ``slow``: by its place, or by both of a link;
    ``unclear``: slow first pairs that this explains by neither.
    """

    pairs: dict[Pair, Sequence[float]] = field(default_factory=dict)
    slow: dict[tuple[str, ...], Slow] = field(default_factory=dict)
    unclear: list[Pair] = field(default_factory=list)


def matching(places: Sequence[str], turn: int) -> list[Pair]:
    """Disjoint pairs of all places but one of an odd number, others at each turn, as in the rounds
    of a tournament: turn 0 pairs neighbours, and all but one place go on by one with each turn.
    """
    padded = [*places, *([""] if len(places) % 2 else [])]
    first, *ring = [*padded[0::2], *reversed(padded[1::2])]
    at = turn % max(1, len(ring))
    order = [first, *ring[at:], *ring[:at]]
    pairs = zip(order[: len(order) // 2], reversed(order), strict=False)
    return [pair for pair in pairs if all(pair)]


def find_slow(places: Sequence[str], measure: Measure) -> Regrouped:
    """Measure and pair anew until each slow pair is explained. At least four places are needed to
    say which is slow; of fewer, the rates are returned.
    """

    def rates_of(pairs: Sequence[Pair]) -> dict[Pair, Sequence[float]]:
        rates = measure(pairs) if pairs else {}
        return {pair: list(rates.get(pair, ())) or [0.0] * ROUNDS for pair in pairs}

    found = Regrouped(pairs=rates_of(matching(places, 0)))
    odd = len(places) % 2
    if odd and len(places) > 1:
        found.pairs.update(rates_of([(places[0], places[-1])]))
    slow = [pair for pair, one in slow_among(found.pairs).items() if one.slow]
    if not slow:
        return found
    reference = [rate for pair, own in found.pairs.items() if pair not in slow for rate in own]
    limit = confirming_limit([rate for pair in slow for rate in found.pairs[pair]], reference)
    level = median(reference)

    def is_slow(rates: Sequence[float]) -> bool:
        return log(median(rates)) - log(level) < -limit

    def blame(who: tuple[str, ...], tried: Mapping[Pair, Sequence[float]]) -> None:
        rate = median([rate for rates in tried.values() for rate in rates])
        bound = level * math.exp(-limit)
        found.slow[who] = Slow(rate=rate, reference=level, bound=bound, tried=[*tried])

    later: dict[Pair, Sequence[float]] = {}
    for turn in range(1, 4 if odd else 3):  # of an odd number, one place rests in each
        later.update(rates_of(matching(places, turn)))
    for place in dict.fromkeys(place for pair in slow for place in pair):
        good_before = any(place in pair for pair in found.pairs if pair not in slow)
        tried = {pair: rates for pair, rates in later.items() if place in pair}
        if tried and not good_before and all(map(is_slow, tried.values())):
            blame((place,), tried)
    for pair in slow:
        if any((place,) in found.slow for place in pair):
            continue
        again = rates_of([pair])[pair]
        elsewhere = [rates for other, rates in later.items() if set(other) & set(pair)]
        if is_slow(again) and not any(map(is_slow, elsewhere)):
            blame(pair, {pair: [*found.pairs[pair], *again]})
        else:
            found.unclear.append(pair)
    return found


def explained(regrouped: Regrouped, errors: Mapping[Pair, str]) -> dict[str, Finding]:
    """One finding a pair, and one for each slow place or link. ``errors``: why pairs could not
    exchange, or got wrong bytes, which is no matter of peers.
    """
    findings: dict[str, Finding] = {}
    for pair in dict.fromkeys((*regrouped.pairs, *errors)):  # those that were tried later too
        rounds = regrouped.pairs.get(pair, ())
        said = errors.get(pair) or f"{median(rounds):.0f} MiB/s"
        blamed = " and ".join(place for place in pair if (place,) in regrouped.slow)
        finding = Finding(said=said, unit=MIBS, measured=median(rounds) if rounds else None)
        if blamed:
            said = f"{said}; {blamed} is to blame"
            finding = replace(finding, state="unmeasured", said=said)
        elif pair in errors:
            finding = replace(finding, state="unfit", todo=_todo(pair))
        elif pair in regrouped.unclear:
            said += ", slow once and not again, or among too few good pairs"
            finding = replace(finding, state="unmeasured", said=said)
        if rounds or not blamed:
            findings[JOIN.join(pair)] = finding
    for who, slow in regrouped.slow.items():
        tried = ", ".join(JOIN.join(pair) for pair in slow.tried)
        why = [f" ({errors[pair]})" for pair in slow.tried if pair in errors]
        findings[JOIN.join(who)] = Finding(
            state="unfit",
            said=f"{slow.rate:.0f} MiB/s in {tried}; good pairs {slow.reference:.0f} MiB/s, at"
            f" least {slow.bound:.0f} MiB/s{''.join(why[:1])}",
            todo=_todo(who),
            measured=slow.rate,
            bound=slow.bound,
            unit=MIBS,
            evidence={"pairs": [list(pair) for pair in slow.tried]},
        )
    return findings


def _todo(places: tuple[str, ...]) -> str:
    """What to do about a place, or the link of two."""
    alone, cuda = len(places) == 1, is_cuda(places[0])
    if cuda:
        act = "take the device out" if alone else "place no ring over this link"
        return f"{act}; nvidia-smi nvlink -e and topo -m say what its links do"
    if alone:
        return (
            "take the place out; see what else runs on its cores (top), and what limits its process"
        )
    return "place the two on other cores; see what is between them"


# --- in the processes of the places


def measure(task: Task) -> dict[str, Any]:
    """One round in one process group. ``options``: ``rank``, ``world``, ``port``, ``host``,
    ``prefix`` (of the group's keys, used once), ``kind`` (``pair`` or ``all``), ``timeout_s``.

    Returns ``rate`` in MiB/s, ``repeats``, ``wrong`` (exchanges that did not arrive as they were
    sent). Raises RuntimeError where the group cannot be formed or an exchange fails.
    """
    import torch

    options = task.options
    rank, world = int(options["rank"]), int(options["world"])
    timeout_s = float(options["timeout_s"])
    cuda = is_cuda(task.place)
    device = torch.device(torch_name(task.place))
    client = connect(int(options["port"]), str(options["host"]), timeout_s)
    made = _meet(client, str(options["prefix"]), rank, world, timeout_s, device)
    wait = partial(_wait, made, timeout_s)
    size = (CUDA_BYTES if cuda else PAIR_BYTES) // 4
    values = torch.arange(size, device=device, dtype=torch.int64) % MODULUS
    pair = options["kind"] == "pair"
    act = partial(_between if pair else _together, made, wait, values, rank, world)
    wrong, _ = act()  # connects too; the second one counts
    more, first_s = act()
    wrong += more
    count = torch.tensor([int(task.budget_s / max(1e-6, first_s))], device=device)
    wait(_broadcast(made, count, 0))
    repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(count.item())))
    seconds = 0.0
    for _ in range(repeats):
        bad, took_s = act()
        wrong += bad
        seconds += took_s
    sent = size * 4 * 2.0 if pair else size * 8.0 * (world - 1) / world
    return {"rate": repeats * sent / seconds / 2**20, "repeats": repeats, "wrong": wrong}


def _meet(client: Any, prefix: str, rank: int, world: int, timeout_s: float, device: Any) -> Any:
    """Torch's process group. Members first wait for each other in the store, where a wait has a
    limit: NCCL would wait for ever for one that does not come.
    """
    import torch
    import torch.distributed as dist

    from trainchaos.recovery.collectives import nccl
    from trainchaos.recovery.collectives.group import gloo_device

    store, limit = dist.PrefixStore(prefix, client), timedelta(seconds=timeout_s)
    store.set(f"here-{rank}", "")
    store.wait([f"here-{other}" for other in range(world)], limit)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return nccl.meet(store, rank, world, limit)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads, options._devices = limit, 2, [gloo_device("")]
    return dist.ProcessGroupGloo(store, rank, world, options)


def _wait(made: Any, timeout_s: float, work: Any) -> None:
    """Wait for an operation. Of NCCL, whose own wait ends before the operation does, look until it
    is done, and abort what is not, so that the device is free again.
    """
    if not work.is_completed() and made.name() != "nccl":
        work.wait(timedelta(seconds=timeout_s))
    until_s = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > until_s:
            made.abort()
            raise RuntimeError(f"an exchange did not end within {timeout_s:g} s")
        time.sleep(LOOK_S)


def _broadcast(made: Any, values: Any, source: int) -> Any:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = source
    return made.broadcast([values], options)


def _between(
    made: Any, wait: Callable[[Any], None], values: Any, rank: int, world: int
) -> tuple[int, float]:
    """There and back: how many came wrong here, and seconds."""
    import torch

    sent = [(values + turn).to(torch.float32) for turn in range(world)]
    held = [sent[turn].clone() if turn == rank else torch.zeros_like(sent[0]) for turn in (0, 1)]
    _finish(values)
    began_s = time.monotonic()
    for turn in (0, 1):
        wait(_broadcast(made, held[turn], turn))
    _finish(values)
    took_s = time.monotonic() - began_s
    return sum(not torch.equal(held[turn], sent[turn]) for turn in (0, 1)), took_s


def _together(
    made: Any, wait: Callable[[Any], None], values: Any, rank: int, world: int
) -> tuple[int, float]:
    """One all-reduce of all: whether the sum is wrong, and seconds."""
    import torch

    held = (values + rank).to(torch.float32)
    expected = (values * world + world * (world - 1) // 2).to(torch.float32)
    _finish(values)
    began_s = time.monotonic()
    wait(made.allreduce([held]))
    _finish(values)
    took_s = time.monotonic() - began_s
    return int(not torch.equal(held, expected)), took_s


def _finish(values: Any) -> None:
    import torch

    if values.device.type == "cuda":
        torch.cuda.synchronize(values.device)
