"""The key-value store by which ranks meet answers soon: a value is set and read back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar

from trainchaos.chaos.stats import percentile
from trainchaos.harness.preflight.checks.bounds import in_rounds
from trainchaos.harness.preflight.checks.check import Asking, Measured, PlaceCheck, Task
from trainchaos.harness.preflight.checks.findings import Finding, Rate
from trainchaos.recovery.transport.reverse_dns import nameless

LEAST_TRIPS, MOST_TRIPS = 30, 2000
TIMEOUT_S = 10.0
"""Of one request; torch's own default is 5 minutes."""


def connect(port: int, host: str, timeout_s: float = TIMEOUT_S) -> Any:
    """A client of torch's TCPStore. Raises RuntimeError."""
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    return nameless(
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    )


@dataclass(frozen=True, kw_only=True)
class StoreCheck(PlaceCheck):
    """``connect``: gives a client with ``set`` and ``get`` for a port and a host; ``clock``:
    seconds.
    """

    name: ClassVar = "store"
    seconds: ClassVar = (0.5, 0.5)
    of_host: ClassVar = True
    connect: Callable[[int, str], Any] = connect
    clock: Callable[[], float] = time.monotonic

    def options(self, asking: Asking) -> Mapping[str, Any]:
        """Where the store is."""
        return asking.store(self)

    def measure(self, task: Task) -> Measured:
        """Round trips of a set and a get, each checked, until the time is over. ``options``:
        ``port``, ``host``.
        """
        client = self.connect(int(task.options["port"]), str(task.options["host"]))
        trips_s: list[float] = []
        wrong = 0
        began_s = self.clock()
        while len(trips_s) < MOST_TRIPS and (
            len(trips_s) < LEAST_TRIPS or self.clock() - began_s < task.budget_s
        ):
            value = f"{task.seed}/{len(trips_s)}"
            at_s = self.clock()
            client.set("preflight", value)
            wrong += client.get("preflight").decode() != value
            trips_s.append(self.clock() - at_s)
        return {"trips_s": trips_s, "wrong": wrong}

    def judge(self, place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
        """Another value than was set is unfit. Compared are medians of successive parts; the 99th
        percentile is shown only: of a hundred trips it is one of them.
        """
        (measured,) = rounds
        trips, wrong = measured["trips_s"], int(measured["wrong"])
        middle, late = (1e3 * percentile(trips, share) for share in (0.5, 0.99))
        finding = Finding(
            said=f"{len(trips)} round trips (set, get): median {middle:.2f} ms, 99th percentile"
            f" {late:.2f} ms",
            measured=middle,
            unit="ms",
            evidence={"n": len(trips), "median_ms": middle, "p99_ms": late, "wrong": wrong},
        )
        if wrong:
            finding = replace(
                finding,
                state="unfit",
                said=f"{finding.said}; {wrong} values wrong",
                todo="see what else writes to the store; test the memory of its machine",
                measured=float(wrong),
                bound=0.0,
                unit="values",
            )
        rate = Rate(
            metric="trip_ms",
            rounds=in_rounds([1e3 * one for one in trips]),
            unit="ms",
            high_is_good=False,
            todo="look for load on the machine of the store (top), and for a slow name server",
        )
        return finding, [rate]
