"""The real coordinator, as ``python -m trainchaos.recovery.run --nodes`` runs it, with a probe that
notes how long heartbeats take: ``python -m benchmarks.control_plane.coordinator PROBE ARGS``.

The probe appends a record of 17 bytes to the file PROBE for each answer to a ping and each beat;
that is all it adds. ``records`` reads such a file.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainchaos.recovery.nodes.coordinator.connections import Connections
from trainchaos.recovery.nodes.coordinator.node_state import NodeState
from trainchaos.recovery.nodes.link import protocol

RECORD = struct.Struct("<BIqi")
"""What: an index of KINDS; the node; when it was handled, monotonic nanoseconds; how long it took,
microseconds.
"""
KINDS = ("heartbeat", "beat")
"""``heartbeat``: from the coordinator's ping until it has handled the agent's answer; ``beat``:
from the moment at which an agent writes its report of marks until the coordinator has handled it.
"""
FLUSH_NS = 250_000_000


def watch(probe: Path) -> None:
    """Have the coordinator of this process note each heartbeat that it handled, written at least
    every FLUSH_NS.
    """
    handle, file, flushed_ns = Connections._handle, probe.open("ab", buffering=1 << 16), 0

    def note(self: Connections, state: NodeState, frame: Any) -> None:
        nonlocal flushed_ns
        handle(self, state, frame)
        if isinstance(frame, protocol.Pong):
            kind, begun_ns = 0, frame.sent_ns
        elif isinstance(frame, protocol.Beat):
            kind, begun_ns = 1, frame.time_ns
        else:
            return
        now_ns = time.monotonic_ns()
        micros = min((now_ns - begun_ns) // 1000, 2**31 - 1)
        file.write(RECORD.pack(kind, state.node, now_ns, micros))
        if now_ns - flushed_ns > FLUSH_NS:
            flushed_ns = now_ns
            file.flush()

    Connections._handle = note  # type: ignore[method-assign]


def records(data: bytes) -> Iterator[tuple[str, int, float, float]]:
    """Kind, node, when (monotonic seconds) and how long (milliseconds) of each whole record."""
    whole = len(data) - len(data) % RECORD.size
    for kind, node, at_ns, micros in RECORD.iter_unpack(data[:whole]):
        yield KINDS[kind], node, at_ns / 1e9, micros / 1e3


if __name__ == "__main__":
    from trainchaos.recovery import run
    from trainchaos.recovery.process.output import shield

    shield()
    watch(Path(sys.argv[1]))
    sys.exit(run.main(sys.argv[2:]))
