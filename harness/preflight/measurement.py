"""One pass over the checks of all places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainchaos.harness.preflight import compare, worker
from trainchaos.harness.preflight.asking import Asking, Unmeasurable
from trainchaos.harness.preflight.checks.bounds import ROUNDS
from trainchaos.harness.preflight.checks.check import is_cuda
from trainchaos.harness.preflight.checks.findings import ALL, HOST
from trainchaos.harness.preflight.exchanges import Exchanges

FULL = ("memory", "product", "clocks", "disk", "store", compare.BANDWIDTH, compare.ALL_REDUCE)


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
