"""What the kernel says of a machine: memory, and the disks that the job writes to.

Every figure may be missing (another kernel, a container, a quota): it is said once, and the others
are read. A disk that does not answer holds up whoever reads it, as it does any system call: a
monitor belongs in a thread of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trainchaos.recovery.health.readings.reading import Place, Problem, Problems, Reading

HEAD = 1 << 16
SECTOR = 4096
"""Bytes of the timed read: one page."""
EVENTS = "memory.events"


@dataclass(kw_only=True)
class HostSource:
    """``node``: number of the machine; ``disks``: name -> directory whose space and latency are
    read; ``probe``: a file of some size on the disk of the same name, which is read from the disk
    where the kernel has no statistics of it (network disks). ``proc``, ``cgroups``: where they are.

    Metrics: ``memory_pressure`` (% of 10 s in which some task waited for memory), ``oom_kills``
    (count), ``disk_free`` (bytes) and ``disk_free_share``, ``disk_latency`` (s an operation).
    """

    node: int | None = None
    disks: Mapping[str, Path] = field(default_factory=dict)
    probe: Mapping[str, Path] = field(default_factory=dict)
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    clock_s: Callable[[], float] = time.perf_counter
    name: str = field(default="host", init=False)
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    _numbers: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._problems = Problems(self.name)
        self._oom = self._oom_file()

    def read(self, now_s: float) -> Sequence[Reading]:
        """Memory, then each disk."""
        found: list[Reading] = []
        where = Place(node=self.node)
        parts = [("memory_pressure", "", self._pressure), ("oom_kills", "", self._oom_kills)]
        for name, path in self.disks.items():
            parts.append(("disk_free", name, partial(self._space, path)))
            parts.append(("disk_latency", name, partial(self._latency, name, path)))
        for metric, disk, part in parts:
            place = where._replace(device=disk) if disk else where
            try:
                for name, value, unit in part():
                    found.append(Reading(place, name, value, unit, now_s))
            except (OSError, ValueError, LookupError) as error:
                self._problems.note(metric, disk, error)
        return found

    def problems(self) -> Sequence[Problem]:
        """New problems."""
        return self._problems.take()

    def _pressure(self) -> Iterator[tuple[str, float, str]]:
        text = _head(self.proc / "pressure/memory")
        yield "memory_pressure", float(text.split("avg10=", 1)[1].split(None, 1)[0]), "%"

    def _oom_kills(self) -> Iterator[tuple[str, float, str]]:
        for line in _head(self._oom).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                yield "oom_kills", float(int(count)), "count"
                return
        raise LookupError(f"{self._oom} has no oom_kill")

    def _oom_file(self) -> Path:
        """Of our own control group (version 2), else of the machine."""
        try:
            for line in _head(self.proc / "self/cgroup").splitlines():
                if line.startswith("0::/"):
                    found = self.cgroups / line[4:].strip() / EVENTS
                    if found.is_file():
                        return found
        except OSError:  # no control groups: the machine's counter is read
            pass
        return self.proc / "vmstat"

    def _space(self, path: Path) -> Iterator[tuple[str, float, str]]:
        disk = os.statvfs(path)
        yield "disk_free", float(disk.f_bavail * disk.f_frsize), "bytes"
        if disk.f_blocks:
            yield "disk_free_share", disk.f_bavail / disk.f_blocks, "1"

    def _latency(self, name: str, path: Path) -> Iterator[tuple[str, float, str]]:
        """Mean time of the operations since the last call (none, nothing to say); of a disk that
        the kernel keeps no statistics of, the time of one read.
        """
        if name not in self._numbers:
            device = os.stat(path).st_dev
            known = f"{os.major(device)} {os.minor(device)}"
            self._numbers[name] = known if self._statistics(known) else None
        number = self._numbers[name]
        if number is None:
            yield "disk_latency", self._timed(name), "s"
            return
        now = self._statistics(number)
        if now is None:
            raise LookupError(f"/proc/diskstats has no device {number} any more")
        before = self._seen.get(name)
        self._seen[name] = now
        if before is not None and now[0] > before[0] and now[1] >= before[1]:
            yield "disk_latency", (now[1] - before[1]) / (now[0] - before[0]) / 1e3, "s"

    def _statistics(self, number: str) -> tuple[int, int] | None:
        """Operations done and milliseconds that they took (fields 1, 4, 5 and 8 of the kernel's
        Documentation/admin-guide/iostats.rst).
        """
        for line in _head(self.proc / "diskstats").splitlines():
            words = line.split()
            if " ".join(words[:2]) == number:
                reads, read_ms, writes, write_ms = (int(words[3 + n]) for n in (0, 3, 4, 7))
                return reads + writes, read_ms + write_ms
        return None

    def _timed(self, name: str) -> float:
        if name not in self.probe:
            raise LookupError("the kernel has no statistics of this disk, and no file to read")
        fd = os.open(self.probe[name], os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Otherwise the read would be of memory.
            os.posix_fadvise(fd, 0, SECTOR, os.POSIX_FADV_DONTNEED)
            began_s = self.clock_s()
            os.pread(fd, SECTOR, 0)
            return max(0.0, self.clock_s() - began_s)
        finally:
            os.close(fd)


def _head(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, HEAD).decode("ascii", "replace")
    finally:
        os.close(fd)
