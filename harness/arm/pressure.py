"""Records how short of processor time the machines of an arm are while it trains, so that its rates
can be judged.

For local ranks the harness reads (``recovery.process.pressure``), and only while the job trains, so
that a recovery does not pay for it. On nodes the agents read all the time, and the newest reading
of each node is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.process.host import RecordEvent
from trainchaos.recovery.process.pressure import EVERY_S, PressureReader, PressureReading
from trainchaos.recovery.supervise.supervision import Stage

MOST_NODES = 8
"""How many nodes' readings are recorded at a time."""

Later = Callable[[float, Callable[[], None]], None]


def follow(record: RecordEvent, later: Later, read: Callable[[], Iterable[dict[str, Any]]]) -> None:
    """Record what ``read`` finds, periodically from now on."""

    def look() -> None:
        for data in read():
            record(Kind.PRESSURE_READ, **data)
        later(EVERY_S, look)

    later(0.0, look)


def of_this_machine(
    training: Callable[[], Mapping[str, int]], reader: PressureReader | None = None
) -> Callable[[], Iterable[dict[str, Any]]]:
    """Readings of this machine. ``training``: the pids of the ranks that train now, rank 0 first;
    empty while the job does anything else.
    """
    reads = (reader or PressureReader()).read

    def read() -> Iterable[dict[str, Any]]:
        pids = training()
        found = reads(pids) if pids else None
        return [asdict(found)] if found is not None else []

    return read


def follow_command(scene: Any) -> None:
    """As ``follow``, for the ranks of a ``harness.script.scene.CommandScene``."""
    follow(scene.record, scene.later, of_this_machine(scene.training))


def follow_built_in(scene: Any, cluster: Any) -> None:
    """As ``follow``, for ranks that are not simulated. ``scene``: their
    ``harness.run.orchestrator.BuiltInScene``.
    """
    if cluster.simulated:
        return

    def training() -> Mapping[str, int]:
        now = scene.controller
        found = {n: cluster.pid(n) for n in now.members} if now.stage is Stage.TRAINING else {}
        return {name: pid for name, pid in found.items() if pid is not None}

    pressures = getattr(cluster, "pressures", None)
    read = (
        of_this_machine(training)
        if pressures is None
        else _of_nodes(scene, cluster.now_ns, pressures)
    )
    follow(scene.record, scene.later, read)


def _of_nodes(
    scene: Any,
    now_ns: Callable[[], int],
    pressures: Callable[[], Mapping[int, tuple[int, PressureReading]]],
) -> Callable[[], Iterable[dict[str, Any]]]:
    since: dict[int, int] = {}  # generation -> when it was first seen to train
    written: dict[int, int] = {}

    def read() -> Iterable[dict[str, Any]]:
        now = scene.controller
        if now.stage is not Stage.TRAINING:
            return
        began_ns = since.setdefault(now.generation, now_ns())
        for node, (read_ns, reading) in islice(sorted(pressures().items()), MOST_NODES):
            ranks = {name: reading.ranks[name] for name in now.members if name in reading.ranks}
            if ranks and read_ns > max(began_ns, written.get(node, 0)):  # not of a recovery
                written[node] = read_ns
                yield {**asdict(reading), "ranks": ranks, "node": node, "read_ns": read_ns}

    return read
