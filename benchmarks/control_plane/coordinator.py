"""The real coordinator, as ``python -m trainchaos.recovery.run --nodes`` runs it, with a probe that
notes how long heartbeats take: ``python -m benchmarks.control_plane.coordinator PROBE ARGS``.

The probe appends a record of 13 bytes to the file PROBE for each answer to a ping and each beat;
that is all it adds. ``records`` reads such a file.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from trainchaos.recovery.nodes.coordinator.remote_processes import RemoteProcesses
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.clock import ClockWatch

RECORD = struct.Struct("<Bqi")
"""What: an index of KINDS; when it was handled, monotonic nanoseconds; how long it took,
microseconds.
"""
KINDS: tuple[Literal["heartbeat"], Literal["beat"]] = ("heartbeat", "beat")
"""``heartbeat``: from the coordinator's ping until it has handled the agent's answer; ``beat``:
from the moment at which an agent writes its report of marks until the coordinator has handled it.
"""
FLUSH_NS = 250_000_000


class Probe:
    """Appends records to a file, written at least every FLUSH_NS while there are any."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=1 << 16)  # noqa: SIM115 - for its whole life
        self._flushed_ns = 0

    def note(self, kind: int, begun_ns: int) -> None:
        """Something that began then is handled now."""
        now_ns = time.monotonic_ns()
        self._file.write(RECORD.pack(kind, now_ns, min((now_ns - begun_ns) // 1000, 2**31 - 1)))
        if now_ns - self._flushed_ns > FLUSH_NS:
            self._flushed_ns = now_ns
            self._file.flush()


def watch(probe: Probe) -> None:
    """Have the coordinator of this process tell the probe of each heartbeat that it handled."""
    answered, handle = ClockWatch.answered, RemoteProcesses.handle

    def note_answer(self: ClockWatch, **times: int) -> None:
        answered(self, **times)
        probe.note(0, times["sent_ns"])

    def note_beat(self: RemoteProcesses, state: Any, frame: Any) -> None:
        handle(self, state, frame)
        if isinstance(frame, protocol.Beat):
            probe.note(1, frame.time_ns)

    ClockWatch.answered = note_answer  # type: ignore[method-assign]
    RemoteProcesses.handle = note_beat  # type: ignore[method-assign]


def records(data: bytes) -> Iterator[tuple[str, float, float]]:
    """Kind, when (monotonic seconds) and how long (milliseconds) of each whole record."""
    whole = len(data) - len(data) % RECORD.size
    for kind, at_ns, micros in RECORD.iter_unpack(data[:whole]):
        yield KINDS[kind], at_ns / 1e9, micros / 1e3


def main() -> int:
    """Run the coordinator and return its exit status."""
    from trainchaos.recovery import run

    watch(Probe(Path(sys.argv[1])))
    return run.main(sys.argv[2:])


if __name__ == "__main__":
    from trainchaos.recovery.process.output import shield

    shield()
    sys.exit(main())
