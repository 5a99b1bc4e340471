"""Real limits on memory and processor time: one control group per process, version 1 or 2.

Groups are made below the root of the hierarchy, with names that start with ``chaos-``, and hold
only processes that a fault hits. Memory that a process used before it entered the group is not
counted in the group.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trainchaos.harness.undo.records import RemoveCgroup

ROOT = Path("/sys/fs/cgroup")
MIB = 1 << 20
PERIOD_US = 20_000
LEAST_US = 1_000
CONTROLLERS = ("memory", "cpu")


def lacks_cgroup() -> str | None:
    """Why no control group can be made here; None when one can."""
    for controller in CONTROLLERS:
        root = _root(controller)
        if root is None:
            return f"there is no {controller} controller"
        if not os.access(root, os.W_OK):
            return f"{root} cannot be written by this user"
    return None


class CgroupControl:
    """Control groups of the processes of one arm. ``pid_of`` raises KeyError for an unknown
    process.
    """

    def __init__(self, arm: str, pid_of: Callable[[str], int]) -> None:
        self._prefix = "chaos-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", arm)
        self._pid_of = pid_of
        self._home: dict[Path, str] = {}  # the group that a process came from, by its new group

    def undo(self, process: str) -> Sequence[RemoveCgroup]:
        """The records by which any process can remove this process's groups."""
        return [
            RemoveCgroup(path=path)
            for path in dict.fromkeys(self._path(process, c) for c in CONTROLLERS)
        ]

    def limit_memory(self, process: str, mib: int) -> None:
        """Cap memory at current usage plus ``mib``; beyond that the kernel kills only this process.

        Raises OSError.
        """
        group = self._enter(
            process,
            "memory",
            limits={
                "memory.limit_in_bytes": str(mib * MIB),
                "memory.memsw.limit_in_bytes": str(mib * MIB),
                "memory.max": str(mib * MIB),
                "memory.swap.max": "0",
            },
        )
        assert group.is_dir()

    def oom_kills(self, process: str) -> int:
        """How many processes the kernel has killed in its memory group, by the kernel's own
        count.
        """
        return count_in(self._path(process, "memory"), "oom_kill") or 0

    def limit_cores(self, processes: Sequence[str], cores: float) -> None:
        """Divide ``cores`` of processor time among the processes. Raises OSError."""
        quota = max(LEAST_US, int(PERIOD_US * cores / len(processes)))
        limits = {
            "cpu.cfs_period_us": str(PERIOD_US),
            "cpu.cfs_quota_us": str(quota),
            "cpu.max": f"{quota} {PERIOD_US}",
        }
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                self._enter(process, "cpu", limits=limits)

    def throttled(self, process: str) -> int:
        """In how many periods the kernel throttled it."""
        return count_in(self._path(process, "cpu"), "nr_throttled") or 0

    def release(self, process: str) -> None:
        """Move it back to its former group, if it is alive, and remove its groups; safe to repeat.
        Raises OSError.
        """
        for group in dict.fromkeys(self._path(process, c) for c in CONTROLLERS):
            if not group.is_dir():
                continue
            home = self._home.get(group)
            for pid in (group / "cgroup.procs").read_text().split():
                if home is not None:
                    with contextlib.suppress(ProcessLookupError):
                        (Path(home) / "cgroup.procs").write_text(pid)
            group.rmdir()

    def _path(self, process: str, controller: str) -> Path:
        return (_root(controller) or ROOT) / f"{self._prefix}-{process}"

    def _enter(self, process: str, controller: str, *, limits: dict[str, str]) -> Path:
        """Put it into its group, made if missing, and set those of the limits that this cgroup
        version has.
        """
        group, pid = self._path(process, controller), self._pid_of(process)
        group.mkdir(exist_ok=True)
        for name, value in limits.items():
            if (group / name).exists():
                (group / name).write_text(value)
        self._home.setdefault(group, str(group_of(pid, controller)))
        (group / "cgroup.procs").write_text(str(pid))
        return group


def count_in(group: Path, name: str) -> int | None:
    """A count of the kernel's in a group of either version: ``oom_kill``, ``nr_throttled``; None if
    it cannot be read.
    """
    for file in (
        ("cpu.stat",) if name == "nr_throttled" else ("memory.oom_control", "memory.events")
    ):
        with contextlib.suppress(OSError):
            found = re.search(rf"^{name} (\d+)$", (group / file).read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return None


def _root(controller: str) -> Path | None:
    """The hierarchy that has the controller, or None."""
    if (ROOT / controller / "cgroup.procs").exists():
        return ROOT / controller
    with contextlib.suppress(OSError):
        if controller in (ROOT / "cgroup.subtree_control").read_text().split():
            return ROOT
    return None


def group_of(pid: int, controller: str) -> Path:
    """The group that a process is in now. Raises OSError."""
    root = _root(controller) or ROOT
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or (root == ROOT and not controllers):
            return root / path.lstrip("/")
    return root
