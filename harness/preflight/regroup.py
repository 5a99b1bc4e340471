"""Which place, or which link, is slow: pairs are measured, then suspects with good partners.

Disjoint pairs are measured first, each place in one of them. Of a pair that is slow among its
peers, each member is then measured with a member of a good pair; who is slow there too, and once
more with another good partner, is the slow place. If neither is, the pair is measured again: then
it is the link between them. A disturbance that passes is found by none of these. A cluster of n
places needs n / 2 measurements at once and a few more, instead of n (n - 1) / 2. DLRover checks
nodes so before it trains (its "Introduction to Check the Node Healthy"); the second partner and the
repeat of the pair are added here, against false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trainchaos.harness.preflight.checks.bounds import (
    ROUNDS,
    confirming_limit,
    slow_among,
    slow_beside,
)
from trainchaos.recovery.health.statistics.robust import median

Pair = tuple[str, str]
Measure = Callable[[Sequence[Pair]], Mapping[Pair, Sequence[float]]]
"""Of disjoint pairs: rates of each, round by round, high is good; a pair that could not exchange is
missing, or has zeros.
"""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A slow place or link. ``rate``: median with all partners it was slow with; ``reference``:
    median of good pairs; ``bound``: what it should have reached; ``tried``: pairs that say so.
    """

    rate: float
    reference: float
    bound: float
    tried: Sequence[Pair]


@dataclass(kw_only=True)
class Regrouped:
    """``pairs``: rates of the first pairs; ``places``, ``links``: the slow ones; ``unclear``: slow
    first pairs without a good partner to try their members with, or slow no more.
    """

    pairs: dict[Pair, Sequence[float]] = field(default_factory=dict)
    places: dict[str, Slow] = field(default_factory=dict)
    links: dict[Pair, Slow] = field(default_factory=dict)
    unclear: list[Pair] = field(default_factory=list)


def first_pairs(places: Sequence[str]) -> list[Pair]:
    """Disjoint; of an odd number, the last place is in none."""
    return [(places[i], places[i + 1]) for i in range(0, len(places) - 1, 2)]


def find_slow(places: Sequence[str], measure: Measure) -> Regrouped:
    """Measure and regroup until each slow pair is explained. At least four places are needed to say
    which is slow; of fewer, the rates are returned.
    """
    found = Regrouped()
    pairs = first_pairs(places)
    if not pairs:
        return found
    found.pairs.update(_all(pairs, measure))
    if len(places) % 2:
        found.pairs.update(_all([(places[0], places[-1])], measure))
    slow = [pair for pair, one in slow_among(found.pairs).items() if one.slow]
    if not slow:
        return found
    good = [pair for pair in found.pairs if pair not in slow]
    partners = list(dict.fromkeys(place for pair in good for place in pair))
    suspects = list(dict.fromkeys(place for pair in slow for place in pair))
    suspects = [place for place in suspects if place not in partners]
    reference = [value for pair in good for value in found.pairs[pair]]
    rates = [value for pair in slow for value in found.pairs[pair]]
    limit = confirming_limit(rates, reference)
    level = median(reference)

    def again(wanted: Collection[str], turn: int) -> dict[str, tuple[Pair, Sequence[float]]]:
        numbers = {place: i for i, place in enumerate(suspects) if place in wanted}
        return {
            place: (pair, values)
            for place, pair, values in _with_partners(numbers, partners, turn, measure)
            if slow_beside(values, reference, limit)
        }

    def verdict(tried: Sequence[tuple[Pair, Sequence[float]]]) -> Slow:
        return Slow(
            rate=median([value for _, values in tried for value in values]),
            reference=level,
            bound=level * math.exp(-limit),
            tried=[pair for pair, _ in tried],
        )

    guilty = again(suspects, 0)
    confirmed = again(guilty, 1)
    for place, tried in confirmed.items():
        found.places[place] = verdict([guilty[place], tried])
    for pair in slow:
        if any(place in found.places for place in pair):
            continue
        values = _all([pair], measure)[pair]
        if slow_beside(values, reference, limit) and not any(place in guilty for place in pair):
            found.links[pair] = verdict([(pair, found.pairs[pair]), (pair, values)])
        else:
            found.unclear.append(pair)
    return found


def _with_partners(
    wanted: Mapping[str, int], partners: Sequence[str], turn: int, measure: Measure
) -> list[tuple[str, Pair, Sequence[float]]]:
    """Each wanted place with a good partner, as many at once as there are partners. ``wanted``:
    place -> its number among the suspects, so that its partner is another one at each turn.
    """
    found = []
    batches: dict[int, dict[str, Pair]] = {}
    for place, number in wanted.items():
        pair = (place, partners[(number + turn) % len(partners)])
        batches.setdefault(number // len(partners), {})[place] = pair
    for pairs in batches.values():
        values = _all(list(pairs.values()), measure)
        found += [(place, pair, values[pair]) for place, pair in pairs.items()]
    return found


def _all(pairs: Sequence[Pair], measure: Measure) -> dict[Pair, Sequence[float]]:
    """Rates of all of them; of one that could not exchange, zeros."""
    values = measure(pairs)
    return {pair: list(values.get(pair, ())) or [0.0] * ROUNDS for pair in pairs}
