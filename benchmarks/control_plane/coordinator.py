"""The real coordinator, as ``python -m trainchaos.recovery.run --nodes`` runs it, with a probe that
notes how long heartbeats take: ``python -m benchmarks.control_plane.coordinator PROBE ARGS``.

The probe appends a record of 17 bytes to the file PROBE for each answer to a ping and each beat;
that is all it adds. ``records`` reads such a file. With PROFILE in the environment it is profiled
too, by cProfile, which makes it about twice as slow: ``python -m pstats FILE``.
"""

from __future__ import annotations

import cProfile
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from trainchaos.recovery.nodes.coordinator.connections import Connections
from trainchaos.recovery.nodes.coordinator.node_state import NodeState
from trainchaos.recovery.nodes.coordinator.remote_processes import RemoteProcesses
from trainchaos.recovery.nodes.link import protocol

RECORD = struct.Struct("<BIqi")
"""What: an index of KINDS; the node; when it was handled, monotonic nanoseconds; how long it took,
microseconds.
"""
KINDS: tuple[Literal["heartbeat"], Literal["beat"]] = ("heartbeat", "beat")
"""``heartbeat``: from the coordinator's ping until it has handled the agent's answer; ``beat``:
from the moment at which an agent writes its report of marks until the coordinator has handled it.
"""
FLUSH_NS = 250_000_000
PROFILE = "TRAINCHAOS_LOAD_PROFILE"
"""Environment variable with the file to which the profile is written, again and again: the
coordinator of a case is killed in the end.
"""
PROFILE_NS = 2_000_000_000


class Probe:
    """Appends records to a file, written at least every FLUSH_NS while there are any."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=1 << 16)
        self._flushed_ns = 0

    def note(self, kind: int, node: int, begun_ns: int) -> None:
        """Something of a node that began then is handled now."""
        now_ns = time.monotonic_ns()
        micros = min((now_ns - begun_ns) // 1000, 2**31 - 1)
        self._file.write(RECORD.pack(kind, node, now_ns, micros))
        if now_ns - self._flushed_ns > FLUSH_NS:
            self._flushed_ns = now_ns
            self._file.flush()


def watch(probe: Probe) -> None:
    """Have the coordinator of this process tell the probe of each heartbeat that it handled."""
    handle = Connections._handle

    def note(self: Connections, state: NodeState, frame: Any) -> None:
        handle(self, state, frame)
        if isinstance(frame, protocol.Pong):
            probe.note(0, state.node, frame.sent_ns)
        elif isinstance(frame, protocol.Beat):
            probe.note(1, state.node, frame.time_ns)

    Connections._handle = note  # type: ignore[method-assign]


def records(data: bytes) -> Iterator[tuple[str, int, float, float]]:
    """Kind, node, when (monotonic seconds) and how long (milliseconds) of each whole record."""
    whole = len(data) - len(data) % RECORD.size
    for kind, node, at_ns, micros in RECORD.iter_unpack(data[:whole]):
        yield KINDS[kind], node, at_ns / 1e9, micros / 1e3


def profile(path: str) -> None:
    """Profile this thread as soon as the first mark of a rank comes."""
    found, turn, handle = cProfile.Profile(), Connections.turn, RemoteProcesses._beat
    written_ns = 0

    def begun(self: RemoteProcesses, state: NodeState, beat: protocol.Beat) -> None:
        nonlocal written_ns
        handle(self, state, beat)
        if beat.marks and not written_ns:
            written_ns = time.monotonic_ns()
            found.enable()

    def profiled(self: Connections, timeout_s: float) -> None:
        nonlocal written_ns
        turn(self, timeout_s)
        if written_ns and time.monotonic_ns() > written_ns + PROFILE_NS:
            found.dump_stats(path)
            written_ns = time.monotonic_ns()
            found.enable()

    RemoteProcesses._beat = begun  # type: ignore[method-assign]
    Connections.turn = profiled  # type: ignore[method-assign]


def main() -> int:
    """Run the coordinator and return its exit status."""
    from trainchaos.recovery import run

    watch(Probe(Path(sys.argv[1])))
    if path := os.environ.get(PROFILE):
        profile(path)
    return run.main(sys.argv[2:])


if __name__ == "__main__":
    from trainchaos.recovery.process.output import shield

    shield()
    sys.exit(main())
