"""Ranks that should hold the same state say that they do not.

For whoever has no supervisor: the supervisor compares the digests of a generation itself, and acts
on them (``recovery.supervise.divergence``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainchaos.recovery.health.detectors.base import MOST_PLACES, Alarm
from trainchaos.recovery.health.readings.reading import JOB, Place, Reading

MOST_OPEN = 4
"""Digests that are waited for: ranks are a step apart at the most, and a rank that is lost never
answers.
"""


@dataclass(kw_only=True)
class DigestDetector:
    """Metric ``digest``: its ``text`` after ``step``. Value: digests of one step; threshold: 1.
    The alarm names each rank that differs from most others, or the job where no digest has a
    majority. ``shards``: rank -> the shard that it holds, where not all hold the same.

    Null model: all are equal, bit for bit, so that there are no false alarms. A job whose sums
    differ from rank to rank has no use for this detector.
    """

    what: str = field(default="digest-mismatch", init=False)
    rate: float = field(default=0.0, init=False)
    shards: Mapping[int, int] = field(default_factory=dict)
    _open: dict[int, dict[Place, tuple[str, float]]] = field(default_factory=dict, repr=False)
    _known: dict[Place, int] = field(default_factory=dict, repr=False)
    _done: int = -1
    _alarmed: set[Place] = field(default_factory=set, repr=False)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found: list[Alarm] = []
        for reading in readings:
            if reading.metric != "digest" or reading.step is None or not reading.text:
                continue
            if reading.where not in self._known and len(self._known) >= MOST_PLACES:
                continue
            if reading.step <= self._done - MOST_OPEN:  # the job went back to an earlier step
                self._open.clear()
                self._done = -1
            self._known[reading.where] = reading.step
            if reading.step <= self._done:
                continue
            step = self._open.setdefault(reading.step, {})
            step[reading.where] = reading.text, reading.time_s
            # Of the first step nobody knows how many there will be.
            if self._done >= 0 and len(step) == len(self._known):
                found += self._close(reading.step)
            elif self._done < 0 and len(self._open) > 1:
                found += self._close(min(self._open))
        for step_number in sorted(self._open)[:-MOST_OPEN]:
            found += self._close(step_number)
        return found

    def _close(self, number: int) -> list[Alarm]:
        """Compare what there is of a step, and of all before it."""
        found: list[Alarm] = []
        for step in sorted(one for one in self._open if one <= number):
            held: dict[int, dict[Place, tuple[str, float]]] = {}
            for where, said in self._open.pop(step).items():
                shard = 0 if where.rank is None else self.shards.get(where.rank, 0)
                held.setdefault(shard, {})[where] = said
            for digests in held.values():
                found += self._compare(step, digests)
        self._done = max(self._done, number)
        # A rank that was not heard of for so long is not waited for.
        self._known = {
            where: step for where, step in self._known.items() if step > self._done - MOST_OPEN
        }
        return found

    def _compare(self, step: int, digests: Mapping[Place, tuple[str, float]]) -> list[Alarm]:
        counts = Counter(text for text, _ in digests.values())
        if len(counts) == 1:
            self._alarmed -= digests.keys() | {JOB}
            return []
        (most, votes), *_ = counts.most_common(1)
        since_s = min(time_s for _, time_s in digests.values())
        majority = 2 * votes > len(digests)
        odd = [where for where, (text, _) in digests.items() if text != most] if majority else [JOB]
        new = [where for where in odd if where not in self._alarmed]
        self._alarmed |= set(new)
        return [
            Alarm(
                what=self.what,
                where=where,
                since_s=since_s,
                value=float(len(counts)),
                threshold=1.0,
                evidence={"step": step, "ranks": len(digests), "with_the_majority": votes},
            )
            for where in new
        ]
