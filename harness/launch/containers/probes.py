"""Measures links between nodes with an uninvolved client in one network namespace and a server in
the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainchaos.harness.launch.containers import rules
from trainchaos.harness.launch.containers.inside import Inside

PROBING = "trainchaos.harness.launch.containers.probing"
LOOK_S = 0.02
SERVER_LIMIT_S = 0.5  # for the server to notice that the client is gone
PROBE_LIMIT_S = 15.0
PORTS = (42_000, 60_000)
NOTHING: Mapping[str, Any] = {"round_trip_s": None, "mbit_per_s": None}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How long the client sends, how much of the start is ignored (a burst passes before a rate
    applies), and the window measured. Seconds.
    """

    send_s: float
    settle_s: float
    window_s: float


AT_A_RATE = Sample(send_s=1.2, settle_s=0.3, window_s=0.8)
AT_ANY = Sample(send_s=0.35, settle_s=0.05, window_s=0.2)
"""Used for a link without a rate; short, since it takes bandwidth from the job."""
BY_ENGINE = Sample(send_s=3.5, settle_s=0.5, window_s=2.5)
"""Used where the counter is read through the engine, which takes longer."""
_BYTES = re.compile(r"bytes (\d+)")


class Probes:
    """``standing``: access to a live node's namespace, and its address; None if it is not alive."""

    def __init__(self, standing: Callable[[int], tuple[Inside, str] | None]) -> None:
        self._standing = standing
        self._numbers = itertools.count()
        self._results: dict[int, Mapping[str, Any]] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, link: tuple[int, int], sample: Sample) -> int:
        """Start to measure; returns the probe's number."""
        number = next(self._numbers)
        thread = threading.Thread(
            target=self._measure, args=(number, link, sample), name=f"probe {number}", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return number

    def result(self, number: int) -> Mapping[str, Any] | None:
        """The result, once measured."""
        return self._results.get(number)

    def close(self) -> None:
        """Wait for running probes, bounded."""
        until_s = time.monotonic() + PROBE_LIMIT_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _measure(self, number: int, link: tuple[int, int], sample: Sample) -> None:
        found = NOTHING
        try:
            source, sink = self._standing(link[0]), self._standing(link[1])
            if source is not None and sink is not None:
                sample = sample if sink[0].entered else BY_ENGINE
                found = measure(source[0], sink[0], source[1], sink[1], sample)
        except RuntimeError:
            pass  # a node ended meanwhile: nothing arrived
        finally:
            self._results[number] = found


def measure(
    source: Inside, sink: Inside, source_address: str, sink_address: str, sample: Sample
) -> Mapping[str, Any]:
    """See ``LinkControl.probed``. Bounded by PROBE_LIMIT_S. Raises RuntimeError."""
    port = random.randrange(*PORTS)
    client = [source.python, "-m", PROBING, "ask", sink_address, str(port), str(sample.send_s)]
    server = [sink.python, "-m", PROBING, "serve", sink_address, str(port)]
    said: list[str] = []
    ends = [
        threading.Thread(target=_run, args=(sink, server, []), daemon=True),
        threading.Thread(target=_run, args=(source, client, said), daemon=True),
    ]
    sink.run(["nft", "-f", "-"], rules.counting(source_address))
    try:
        for end in ends:
            end.start()
        rate = _arriving(sink, ends[1], sample)
    finally:
        ends[1].join(PROBE_LIMIT_S)
        ends[0].join(SERVER_LIMIT_S)  # a server that was never reached ends by its own limit
        sink.run(["nft", "delete", "table", "ip", rules.COUNTS])
    answer = json.loads(said[0]) if said else {}
    if answer.get("round_trip_s") is None:
        return NOTHING
    return {"round_trip_s": answer["round_trip_s"], "mbit_per_s": rate}


def _arriving(sink: Inside, client: threading.Thread, sample: Sample) -> float | None:
    """Megabits per second that arrive while the client runs."""
    samples: list[tuple[float, int]] = []
    until_s = time.monotonic() + PROBE_LIMIT_S
    while client.is_alive() and time.monotonic() < until_s:
        text = sink.run(["nft", "list", "counters", "table", "ip", rules.COUNTS])
        found = _BYTES.search(text)
        if found:
            samples.append((time.monotonic(), int(found[1])))
        client.join(LOOK_S)
    return rate_of(samples, sample)


def rate_of(samples: list[tuple[float, int]], sample: Sample) -> float | None:
    """Megabits per second from (seconds, bytes so far), over a window that starts ``settle_s``
    after the first bytes; None if the samples cover less than half of the window.
    """
    began_s = next((at_s for at_s, count in samples if count > samples[0][1]), None)
    if began_s is None:
        return None
    until_s = sample.settle_s + sample.window_s
    window = [
        (at_s, count) for at_s, count in samples if sample.settle_s <= at_s - began_s <= until_s
    ]
    if len(window) < 2 or window[-1][0] - window[0][0] < sample.window_s / 2:
        return None
    return round((window[-1][1] - window[0][1]) * 8e-6 / (window[-1][0] - window[0][0]), 3)


def _run(inside: Inside, argv: list[str], said: list[str]) -> None:
    with contextlib.suppress(RuntimeError):
        said.append(inside.run(argv, limit_s=PROBE_LIMIT_S))
