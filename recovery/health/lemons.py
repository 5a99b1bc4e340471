"""Which places fail more often than chance allows, by what stored logs blame.

Null model: incidents of all places are Poisson processes of one rate per hour in use. Given that
all places together had n, the count of one that was in use for a share q of the hours is then
binomial (n, q), whatever the rate is: the exact comparison of a Poisson count with another
(Przyborowski and Wilenski 1940, Biometrika 31:313). A place is a lemon if the tail of its count is
below the rate of false alarms divided by the number of places (Bonferroni), so that any healthy
fleet has a lemon named with at most that probability. The worst is taken out, and the rest is
compared again, since one lemon hides another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainchaos.chaos.stats import binomial_tail

FALSE_ALARM = 0.01
"""Probability that anything is named in a look at a fleet whose places are alike."""
FEWEST = 3
"""Incidents of a place that count as a history: of one or two, each may have had its own cause, and
whoever is named is out of use until a person has looked.
"""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a place. ``incidents``: it was blamed for; ``used_s``: seconds in which
    processes were on it.
    """

    incidents: int
    used_s: float


@dataclass(frozen=True, kw_only=True)
class Lemon:
    """A place with too many incidents. ``expected``: of a place like the others in its time;
    ``tail``: probability of as many there or more; ``limit``: below which that makes a lemon.
    """

    place: str
    incidents: int
    used_s: float
    expected: float
    tail: float
    limit: float


def lemons(records: Mapping[str, Record], *, false_alarm: float = FALSE_ALARM) -> tuple[Lemon, ...]:
    """The lemons, worst first. ``false_alarm``: see ``FALSE_ALARM``. A place that was never in use,
    or is the only one, is not judged. Raises ValueError for a rate that is not within (0, 1).
    """
    if not 0.0 < false_alarm < 1.0:
        raise ValueError(f"a rate of false alarms is within (0, 1): {false_alarm}")
    left = {place: one for place, one in records.items() if one.used_s > 0}
    limit = false_alarm / max(1, len(left))
    found: list[Lemon] = []
    while len(left) > 1:
        worst = min(
            (_judged(place, left, limit) for place in sorted(left)), key=lambda one: one.tail
        )
        if worst.tail >= limit:
            break
        del left[worst.place]
        found.append(worst)
    return tuple(one for one in found if one.incidents >= FEWEST)


def _judged(place: str, records: Mapping[str, Record], limit: float) -> Lemon:
    own = records[place]
    events = sum(one.incidents for one in records.values())
    span_s = sum(one.used_s for one in records.values())
    others, others_s = events - own.incidents, span_s - own.used_s
    return Lemon(
        place=place,
        incidents=own.incidents,
        used_s=own.used_s,
        expected=others / others_s * own.used_s,
        tail=binomial_tail(own.incidents, events, own.used_s / span_s),
        limit=limit,
    )
