"""Finds what a run has left on this machine, from the machine itself, independently of the run's
own report.

Effects of other programs must not count: processes are identified by a variable in their
environment, shared memory by the pids in its name, groups and mounts by the run's own names.
Network namespaces and queues have no such names, and are compared with their state before the run.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.chaos.errors import LogError
from trainchaos.harness.host import processes, shared_memory
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch import cgroups
from trainchaos.harness.run import heal
from trainchaos.harness.undo import live
from trainchaos.harness.undo.base import mounts
from trainchaos.harness.undo.ledger import read_open

MARK = "CHAOS_FUZZ_PLAY"
"""Variable in the environment of a run's processes that names the play and the search."""
SETTLE_S = 1.0
"""How long dying processes may take after the run has ended."""
LOOK_S = 0.02
KILL_LIMIT_S = 5.0
TOOL_LIMIT_S = 10.0
NAMESPACES = Path("/run/netns")
DEVICES = Path("/sys/class/net")
QUEUES = ("tc", "qdisc", "show")


@dataclass(frozen=True, kw_only=True)
class MachineBefore:
    """The machine before a run. ``token``: the value of ``MARK`` for it; ``since``: clock ticks
    since boot, before the start of any process of the run; ``since_ns``: Unix time; ``namespaces``,
    ``devices``: of the network; ``queues``: lines of ``tc`` about them.
    """

    token: str
    since: int
    since_ns: int = field(default_factory=time.time_ns)
    namespaces: frozenset[str] = field(default_factory=lambda: _names(NAMESPACES))
    devices: frozenset[str] = field(default_factory=lambda: _names(DEVICES))
    queues: frozenset[str] = field(default_factory=lambda: _queues())


def left_by(
    before: MachineBefore, run: RunDirectory | None, place: Path, pids: Collection[int]
) -> tuple[str, ...]:
    """What the run has left, in words. ``run``: its directory, if it made one; ``place``: directory
    with all its files; ``pids``: of its processes.
    """
    until_s = time.monotonic() + SETTLE_S
    while (left := tuple(_left(before, run, place, pids))) and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    return left


def clean(before: MachineBefore, run: RunDirectory | None) -> None:
    """End the remaining processes, and undo the run's effects."""
    for pid, started in marked(before):
        processes.end(pid, started, limit_s=KILL_LIMIT_S)
    if run is not None and ((run.root / live.FILE).exists() or _open(run)):
        heal.heal(run)


def marked(before: MachineBefore) -> list[tuple[int, int]]:
    """(pid, start time) of the living processes of the run."""
    entry = f"{MARK}={before.token}"
    return [
        row for row in processes.since(before.since) if processes.environment_has(row[0], entry)
    ]


def _left(
    before: MachineBefore, run: RunDirectory | None, place: Path, pids: Collection[int]
) -> Iterator[str]:
    for pid, _ in marked(before):
        yield f"process {_command(pid)}"
    if run is not None:
        yield from _of_run(run, pids)
    for where, _ in mounts():
        if Path(where).is_relative_to(place):
            yield f"mount of {where}"
    for path in shared_memory.abandoned(before.since_ns, time.time_ns()):
        if _of(path.name, pids):
            yield f"shared memory {path.name}"
    for name in sorted(_names(NAMESPACES) - before.namespaces):
        yield f"network namespace {name}"
    for line in sorted(_queues() - before.queues):
        # of a device that was there: a container started meanwhile has its own
        if any(f"dev {device} " in line for device in before.devices):
            yield f"queue: {line}"


def _of_run(run: RunDirectory, pids: Collection[int]) -> Iterator[str]:
    if (run.root / live.FILE).exists():
        yield "the run is not over"
    for what in _open(run):
        yield f"open in the ledger: {what}"
    for root in (cgroups.ROOT, *(cgroups.ROOT / name for name in cgroups.CONTROLLERS)):
        for path in root.glob(f"chaos-{run.root.name}-*"):
            if _of(path.name, pids):  # another run may have started in the same second
                yield f"control group {path}"


def _open(run: RunDirectory) -> list[str]:
    try:
        return [entry.undo.intent() if entry.undo else entry.id for entry in read_open(run.ledger)]
    except LogError as error:
        return [error.message]


def _of(name: str, pids: Collection[int]) -> bool:
    return any(int(number) in pids for number in re.findall(r"\d+", name))


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join([str(pid), *(word.decode(errors="replace") for word in words[:4])]).strip()
    return str(pid)


def _names(place: Path) -> frozenset[str]:
    with suppress(OSError):
        return frozenset(path.name for path in place.iterdir())
    return frozenset()


def _queues() -> frozenset[str]:
    """Lines of ``tc``; none if it is not installed."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(QUEUES, capture_output=True, text=True, timeout=TOOL_LIMIT_S)
        return frozenset(done.stdout.splitlines())
    return frozenset()
