"""Finds what a run has left on this machine, from the machine itself, independently of the run's
own report.

Effects of other programs must not count: processes are identified by a variable in their
environment, shared memory by the pids in its name, groups and mounts by the run's own names.
Network namespaces and queues have no such names, and are compared with their state before the run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.errors import LogError
from trainchaos.harness.host import processes, shared_memory
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch import cgroups
from trainchaos.harness.run import heal
from trainchaos.harness.undo import live
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
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Names of namespaces and devices, and the lines of ``tc`` about the queues."""

    namespaces: frozenset[str]
    devices: frozenset[str]
    queues: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class MachineBefore:
    """The machine before a run. ``token``: the value of ``MARK`` for it; ``since``: clock ticks
    since boot; ``since_ns``: Unix time.
    """

    token: str
    since: int
    since_ns: int
    network: Network

    @classmethod
    def now(cls, token: str, since: int) -> MachineBefore:
        """The present state. ``since``: a process's start time, before that of any process of the
        run.
        """
        return cls(token=token, since=since, since_ns=time.time_ns(), network=_network())


def left_by(
    before: MachineBefore, run: RunDirectory | None, place: Path, pids: Collection[int]
) -> tuple[str, ...]:
    """What the run has left, in words. ``run``: its directory, if it made one; ``place``: directory
    with all its files; ``pids``: of its processes.
    """
    until_s = time.monotonic() + SETTLE_S
    while (found := _left(before, run, place, pids)) and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    return found


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
) -> tuple[str, ...]:
    return tuple(
        [
            *(f"process {_command(pid)}" for pid, _ in marked(before)),
            *(_of_run(run, pids) if run is not None else ()),
            *(f"mount of {where}" for where in _mounts(place)),
            *(f"shared memory {name}" for name in _memory(before, pids)),
            *_changed(before.network, _network()),
        ]
    )


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


def _mounts(place: Path) -> list[str]:
    with suppress(OSError):
        points = (line.split()[4] for line in MOUNTS.read_text().splitlines())
        return [point for point in points if Path(point).is_relative_to(place)]
    return []


def _memory(before: MachineBefore, pids: Collection[int]) -> list[str]:
    paths = shared_memory.abandoned(before.since_ns, time.time_ns())
    return [path.name for path in paths if _of(path.name, pids)]


def _of(name: str, pids: Collection[int]) -> bool:
    return any(int(number) in pids for number in re.findall(r"\d+", name))


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join([str(pid), *(word.decode(errors="replace") for word in words[:4])]).strip()
    return str(pid)


def _network() -> Network:
    return Network(
        namespaces=_names(NAMESPACES),
        devices=_names(DEVICES),
        queues=frozenset(_told(("tc", "qdisc", "show"))),
    )


def _changed(before: Network, now: Network) -> Iterator[str]:
    """New queues only of devices that existed before: a container started meanwhile has its own
    device.
    """
    for name in sorted(now.namespaces - before.namespaces):
        yield f"network namespace {name}"
    for line in sorted(now.queues - before.queues):
        if any(f"dev {device} " in line for device in before.devices):
            yield f"queue: {line}"


def _names(place: Path) -> frozenset[str]:
    try:
        return frozenset(path.name for path in place.iterdir())
    except OSError:
        return frozenset()


def _told(argv: Sequence[str]) -> list[str]:
    """A tool's output lines; none if it is not installed."""
    if shutil.which(argv[0]) is None:
        return []
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()
