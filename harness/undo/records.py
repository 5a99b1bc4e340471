"""Undo records for a run's changes to the machine: a closed set, each written before its act.

Each is plain data and can undo itself, safely repeated, from any process of the same user on the
same machine. Each identifies its object exactly: a process by pid, start time and boot; a mount by
place and source; a queue by its handle. Nothing is ever found by name alone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainchaos.harness.host import processes, shared_memory
from trainchaos.harness.undo.base import (
    Undo,
    UndoOutcome,
    control_groups,
    done,
    failed,
    mounts,
    nothing,
    outside,
)
from trainchaos.harness.undo.containers import RemoveContainers, RemoveNetworks
from trainchaos.harness.undo.slurm import CancelSteps

MARKER = "CHAOS_RUN"
KILL_LIMIT_S = 5.0
CGROUP_LIMIT_S = 3.0
TC_LIMIT_S = 5.0
SETTLE_S = 0.02
_MNT_DETACH = 2


class KillProcess(Undo):
    """Kill one process. ``name``: its role in the run, for people."""

    ends_processes: ClassVar[bool] = True
    do: Literal["kill-process"] = "kill-process"
    pid: int = Field(gt=1, lt=2**31)
    start_time: int
    name: str = ""

    @classmethod
    def of(cls, pid: int, name: str = "") -> KillProcess:
        """The record for a live process."""
        return cls(pid=pid, start_time=processes.start_time(pid), name=name)

    def intent(self) -> str:
        return f"kill {_who(self.pid, self.name)}"

    def idle(self) -> bool:
        """Whether no process is left to kill."""
        return super().idle() or processes.start_time(self.pid) != self.start_time

    def _undo(self) -> UndoOutcome:
        ending = processes.end(self.pid, self.start_time, limit_s=KILL_LIMIT_S)
        who = _who(self.pid, self.name)
        if ending == "gone":
            return nothing(f"{who} is gone")
        return done(f"killed {who}") if ending == "ended" else failed(f"{who} {_why(ending)}")


class KillSession(Undo):
    """Kill every process of a session, whatever its parent is now.

    The kernel does not reuse a session's number while the session has a member, but does once it is
    empty. So once the leader is gone, a member counts as ours only if it also has ``marker``.
    """

    ends_processes: ClassVar[bool] = True
    do: Literal["kill-session"] = "kill-session"
    sid: int = Field(gt=1, lt=2**31)
    start_time: int
    marker: str = ""
    name: str = ""

    @classmethod
    def of(cls, leader: int, name: str = "") -> KillSession:
        """The record for the session that a live process leads (its pid is the session's
        number).
        """
        return cls(
            sid=leader,
            start_time=processes.start_time(leader),
            name=name,
            marker=os.environ.get(MARKER, ""),
        )

    def intent(self) -> str:
        return f"kill the session of {_who(self.sid, self.name)}"

    def idle(self) -> bool:
        """Whether no process is left to kill."""
        return super().idle() or not self._members()

    def _undo(self) -> UndoOutcome:
        leader = processes.start_time(self.sid)
        if leader and leader != self.start_time:
            return nothing(f"the session of {_who(self.sid, self.name)} is gone")
        return _kill_all(self._members, _who(self.sid, self.name))

    def _members(self) -> list[tuple[int, int]]:
        # 0: the leader is gone
        led = bool(self.start_time) and processes.start_time(self.sid) == self.start_time
        found = [(pid, processes.start_time(pid)) for pid in processes.in_sessions({self.sid})]
        entry = f"{MARKER}={self.marker}"
        return [
            (pid, started)
            for pid, started in found
            if started >= self.start_time
            and (led or (self.marker and processes.environment_has(pid, entry)))
        ]


class KillMarked(Undo):
    """Kill every process started since the run began that has the run's marker in its environment.

    Written once, before the run starts its first process. Processes started later inherit the
    marker, so a process is never without a record that covers it.
    """

    ends_processes: ClassVar[bool] = True
    do: Literal["kill-marked"] = "kill-marked"
    marker: str = Field(min_length=8)
    since: int

    def intent(self) -> str:
        return "kill the processes that carry the run's marker"

    def idle(self) -> bool:
        """Whether no process is left to kill."""
        return super().idle() or not self.members()

    def members(self) -> list[tuple[int, int]]:
        """(pid, start time) of the living processes, without the caller and its ancestors."""
        own = processes.ancestors(os.getpid())
        entry = f"{MARKER}={self.marker}"
        found = processes.since(self.since)
        return [
            row for row in found if row[0] not in own and processes.environment_has(row[0], entry)
        ]

    def _undo(self) -> UndoOutcome:
        return _kill_all(self.members, "the run")


class Unmount(Undo):
    """Unmount a file system of the run. ``source``: mountinfo's name of the device; a run uses its
    own names, so that another program's mount at the same place is left alone.
    """

    do: Literal["unmount"] = "unmount"
    path: Path
    source: str = Field(min_length=1)

    def intent(self) -> str:
        return f"unmount {self.path}"

    def stray(self, run: Path) -> str:
        """As in ``Undo``: a run mounts only in its own directory."""
        return outside(self.path, run)

    def _undo(self) -> UndoOutcome:
        libc = ctypes.CDLL(None, use_errno=True)
        did = False
        deadline = time.monotonic() + KILL_LIMIT_S
        while [source for place, source in mounts() if place == str(self.path)][-1:] == [
            self.source
        ]:
            # Detach it if busy: then it takes no new users, and ends with its last one.
            path = os.fsencode(self.path)
            if libc.umount2(path, 0) and libc.umount2(path, _MNT_DETACH):
                return failed(f"could not unmount {self.path}: {os.strerror(ctypes.get_errno())}")
            did = True
            if time.monotonic() > deadline:
                return failed(f"could not unmount {self.path}: it is mounted again and again")
        return done(f"unmounted {self.path}") if did else nothing(f"{self.path} is not mounted")


class RemoveCgroup(Undo):
    """Kill the processes in a control group of the run, and remove it with all groups inside.

    Only a group whose own name starts with ``chaos-`` is touched; a run puts only its own processes
    there.
    """

    ends_processes: ClassVar[bool] = True
    do: Literal["remove-cgroup"] = "remove-cgroup"
    path: Path

    def intent(self) -> str:
        return f"remove the control group {self.path}"

    def _undo(self) -> UndoOutcome:
        above = [str(place) for place in self.path.resolve().parents if os.path.ismount(place)]
        if not self.path.name.startswith("chaos-") or not above or above[0] not in control_groups():
            return failed(f"{self.path} is not a control group of a run: left alone")
        if not self.path.is_dir():
            return nothing(f"the control group {self.path} is gone")
        deadline = time.monotonic() + CGROUP_LIMIT_S
        while True:
            for group in sorted(
                (path.parent for path in self.path.rglob("cgroup.procs")), reverse=True
            ):
                _empty(group)
                try:
                    group.rmdir()
                except OSError:  # busy until its last process is reaped
                    pass
            if not self.path.exists():
                return done(f"removed the control group {self.path}")
            if time.monotonic() > deadline:
                return failed(f"the control group {self.path} cannot be removed: it is in use")
            time.sleep(SETTLE_S)


class RemoveTree(Undo):
    """Remove a file or directory that the run made. ``inside``: a directory that the run owns;
    nothing outside is removed.
    """

    outlives_boot: ClassVar[bool] = True
    do: Literal["remove-tree"] = "remove-tree"
    path: Path
    inside: Path

    def intent(self) -> str:
        return f"remove {self.path}"

    def stray(self, run: Path) -> str:
        """As in ``Undo``: a run owns only its directory, whatever the record says."""
        return outside(self.inside, run) or outside(self.path, run)

    def _undo(self) -> UndoOutcome:
        place, own = self.path.parent.resolve() / self.path.name, self.inside.resolve()
        if own not in place.parents:
            return failed(f"{self.path} is not inside {self.inside}: left alone")
        below = [
            mounted
            for mounted, _ in mounts()
            if Path(mounted) == place or place in Path(mounted).parents
        ]
        if below:
            return failed(f"{self.path} is not removed: {below[0]} is a mount")
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        elif place.exists() or place.is_symlink():
            place.unlink()
        else:
            return nothing(f"{self.path} is gone")
        return done(f"removed {self.path}")


class RemoveQdisc(Undo):
    """Remove the root queue of a network device, if the run made it (identified by its ``handle``,
    ``c4a0:``).
    """

    do: Literal["remove-qdisc"] = "remove-qdisc"
    device: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    handle: str = Field(pattern=r"^[0-9a-f]+:$")
    namespace: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")

    def intent(self) -> str:
        return f"remove the queue {self.handle} of {self.device}"

    def _undo(self) -> UndoOutcome:
        base = ["tc", *(["-netns", self.namespace] if self.namespace else []), "qdisc"]
        shown = _tc([*base, "show", "dev", self.device])
        if f" {self.handle} root" not in (shown or ""):
            return nothing(f"the queue {self.handle} of {self.device} is gone")
        if _tc([*base, "del", "dev", self.device, "root"]) is None:
            return failed(f"tc could not remove the queue {self.handle} of {self.device}")
        return done(f"removed the queue {self.handle} of {self.device}")


class FreeShm(Undo):
    """Remove shared memory that the run's processes left: made during the run (``since_ns`` is Unix
    time), owned by this user, and not held by a living process. ``run``: its directory, whose last
    write shows how long it ran.
    """

    do: Literal["free-shm"] = "free-shm"
    run: Path
    since_ns: int

    def intent(self) -> str:
        return "free shared memory"

    def stray(self, run: Path) -> str:
        return outside(self.run, run)

    def _undo(self) -> UndoOutcome:
        freed, left = shared_memory.free(self.since_ns, self._until_ns())
        if left:
            return failed(f"could not free shared memory {', '.join(left)}")
        return (
            done(f"freed shared memory {', '.join(freed)}")
            if freed
            else nothing("no shared memory is left")
        )

    def _until_ns(self) -> int:
        """When the run was last known to be alive, plus a margin."""
        files = [self.run / "ledger.jsonl", *self.run.glob("events/*/*.jsonl")]
        return max((f.stat().st_mtime_ns for f in files if f.exists()), default=0) + 10 * 10**9


AnyUndo = Annotated[
    KillProcess
    | KillSession
    | KillMarked
    | Unmount
    | RemoveCgroup
    | RemoveTree
    | RemoveQdisc
    | FreeShm
    | RemoveContainers
    | RemoveNetworks
    | CancelSteps,
    Field(discriminator="do"),
]


def _kill_all(members: Callable[[], list[tuple[int, int]]], of: str) -> UndoOutcome:
    """Kill until no process is left: a process may fork during the search."""
    deadline = time.monotonic() + KILL_LIMIT_S
    killed: set[int] = set()
    spared = processes.ancestors(os.getpid())
    while found := members():
        # Descendants are killed too, whatever session or environment they have.
        for pid, started in processes.with_descendants(found):
            if pid in spared:
                continue
            ending = processes.end(pid, started, limit_s=max(0.0, deadline - time.monotonic()))
            if ending in ("stays", "refused"):
                return failed(f"process {pid} of {of} {_why(ending)}")
            killed |= {pid} if ending == "ended" else set()
        if time.monotonic() > deadline:
            return failed(f"processes of {of} start faster than they can be killed")
    if not killed:
        return nothing(f"no process of {of} is left")
    return done(
        f"killed process{'es' if len(killed) > 1 else ''} {', '.join(map(str, sorted(killed)))} of"
        f" {of}"
    )


def _empty(group: Path) -> None:
    """Kill the processes in a control group. A frozen group is thawed first, since (in version 1)
    even SIGKILL does not end a process in it.
    """
    for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        if (group / name).exists():
            (group / name).write_text(value)
    for word in (group / "cgroup.procs").read_text().split():
        processes.end(int(word), processes.start_time(int(word)), limit_s=0.0)


def _tc(command: list[str]) -> str | None:
    """Output of tc; None if it fails."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TC_LIMIT_S, check=False)
    return ran.stdout if ran.returncode == 0 else None


def _who(pid: int, name: str) -> str:
    return f"process {pid} ({name})" if name else f"process {pid}"


def _why(ending: str) -> str:
    return (
        "may not be killed by this user"
        if ending == "refused"
        else "does not end (it hangs in the kernel)"
    )
