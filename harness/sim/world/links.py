"""Links between simulated processes: the cost of a shaped link to a collective."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.launcher import LinkControl
from trainchaos.harness.launch.links.shaping import OPEN, RTO_S, SEGMENT_BYTES, Pacer
from trainchaos.harness.sim.world.clock import NS_PER_S, Clock

Link = tuple[str, str]
ROUND_TRIP_S = 0.0001
MBIT_PER_S = 10_000.0


class SimLinks(LinkControl):
    """Implements ``harness.launch.launcher.LinkControl``. Collectives go around a ring of ranks, as
    in gloo: a message in one direction and its answer in the other. So a link shaped in either
    direction slows its neighbours.
    """

    def __init__(self, clock: Clock, seed: str) -> None:
        self._clock = clock
        self._random = random.Random(f"{seed}/links")
        self._rules: dict[Link, Pacer] = {}
        self._probes: list[Mapping[str, Any]] = []

    def shape(self, links: Sequence[Link], shape: LinkShape) -> str:
        """Shape the links from now on."""
        for link in links:
            if shape == OPEN:
                self._rules.pop(link, None)
            else:
                self._rules[link] = Pacer(shape, self._now_s)
        return "simulated"

    def probe(self, link: Link) -> int:
        """Measure a link; the result is known at once."""
        rule = self._rules.get(link)
        shape = rule.shape if rule else OPEN
        if rule is not None and rule.opens_s(self._now_s) == math.inf:
            self._probes.append({"round_trip_s": None, "mbit_per_s": None})
        else:
            waits_s = rule.opens_s(self._now_s) - self._now_s if rule else 0.0
            rate = MBIT_PER_S if shape.bytes_per_s is None else shape.bytes_per_s * 8e-6
            round_trip_s = round(ROUND_TRIP_S + shape.delay_s + waits_s, 6)
            self._probes.append({"round_trip_s": round_trip_s, "mbit_per_s": round(rate, 3)})
        return len(self._probes) - 1

    def probed(self, number: int) -> Mapping[str, Any] | None:
        """The result of a probe."""
        return self._probes[number]

    def blocked(self, ring: Sequence[str]) -> bool:
        """Whether a collective of these processes cannot proceed now."""
        return any(rule.opens_s(self._now_s) > self._now_s for rule in self._hit(ring))

    def extra_ns(self, ring: Sequence[str], size: int) -> float:
        """Extra time of a collective that sends ``size`` bytes over each link."""
        worst_s = 0.0
        for rule in self._hit(ring):
            shape = rule.shape
            lost = 1 - (1 - shape.loss) ** math.ceil(size / SEGMENT_BYTES)
            rounds = 2 * (len(ring) - 1)
            delay_s = shape.delay_s + shape.jitter_s * self._random.uniform(-1, 1)
            late_s = RTO_S if shape.loss and self._random.random() < lost else 0.0
            rate_s = size / shape.bytes_per_s if shape.bytes_per_s else 0.0
            worst_s = max(worst_s, rounds * max(0.0, delay_s) + rate_s + late_s)
        return worst_s * NS_PER_S

    @property
    def _now_s(self) -> float:
        return self._clock.now_ns / NS_PER_S

    def _hit(self, ring: Sequence[str]) -> list[Pacer]:
        if not self._rules:
            return []
        after = [*ring[1:], *ring[:1]]
        links = [link for pair in zip(ring, after, strict=True) for link in (pair, pair[::-1])]
        return [self._rules[link] for link in dict.fromkeys(links) if link in self._rules]
