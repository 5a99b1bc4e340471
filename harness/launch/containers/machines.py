"""Acts on container nodes as a whole; implements ``harness.launch.launcher.MachineControl``.

A node is killed through the pidfd of its first process if there is one, which is quicker than
through the engine. Evidence on a node comes only from the engine and the kernel's counts, never
from this process.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.container_engine import asking
from trainchaos.harness.launch.containers.links import NodeLinks

MIB = 1 << 20
PERIOD_US = 100_000
NO_LIMIT = 1 << 53  # bytes; the engine does not accept "none" as a change
LEAST_MIB = 6  # the smallest limit that a container may have
_CGROUPS = Path("/sys/fs/cgroup")
_V1 = {
    "memory.events": "memory.oom_control",
    "memory.current": "memory.usage_in_bytes",
    "cpu.stat": "cpu.stat",
}


class Containers(Protocol):
    """The present containers of nodes, by number. Each method raises ProcessLookupError for a node
    that was never started.
    """

    def container(self, node: int) -> Any:
        """The docker-py container."""

    def init_pid(self, node: int) -> int:
        """Pid of its first process on this machine; 0 if unknown or if it has ended."""

    def init_pidfd(self, node: int) -> int:
        """A pidfd of its first process; -1 if there is none."""

    def memory_mib(self) -> int | None:
        """The memory limit that every node has anyway; None: no limit."""

    def cores(self) -> float | None:
        """The processor quota that every node has anyway; None: no quota."""


class ContainerMachines:
    """``links``: drops the packets of a node that is cut off; None if nothing may do that."""

    def __init__(self, containers: Containers, links: NodeLinks | None) -> None:
        self._containers = containers
        self._links = links

    @property
    def can_pause(self) -> bool:
        """Always."""
        return True

    def kill(self, node: int) -> Mapping[str, Any]:
        """SIGKILL its first process: the kernel then kills the rest of its process namespace."""
        pidfd = self._containers.init_pidfd(node)
        if pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return {"signal": "SIGKILL", "by": "pidfd of the container's first process"}
        self._tell(node, "kill")
        return {"signal": "SIGKILL", "by": "the engine"}

    def pause(self, node: int) -> None:
        """Freeze it with the kernel's freezer."""
        if self.seen(node)["state"] != "paused":
            self._tell(node, "pause")

    def resume(self, node: int) -> None:
        """Thaw it, if it is frozen."""
        with contextlib.suppress(ProcessLookupError):
            if self.seen(node)["state"] == "paused":
                self._tell(node, "unpause")

    def limit_memory(self, node: int, spare_mib: int | None) -> None:
        """Limit the container's memory, including swap."""
        usual = self._containers.memory_mib()
        if spare_mib is None:
            limit = NO_LIMIT if usual is None else usual * MIB
        else:
            limit = max(LEAST_MIB * MIB, self._memory_used(node) + spare_mib * MIB)
        self._update(node, mem_limit=limit, memswap_limit=limit)

    def limit_cores(self, node: int, cores: float | None) -> None:
        """Limit the container with a quota."""
        usual = self._containers.cores()
        wanted = usual if cores is None else cores
        quota = -1 if wanted is None else max(1000, int(wanted * PERIOD_US))
        self._update(node, cpu_period=PERIOD_US, cpu_quota=quota)

    def isolate(self, node: int, *, outward: bool = True, inward: bool = True) -> None:
        """Drop packets in its network namespace: only traffic to itself passes. Raises
        RuntimeError.
        """
        if self._links is None:
            raise RuntimeError("packets of nodes cannot be dropped here")
        self._links.isolate(node, outward=outward, inward=inward)

    def rejoin(self, node: int) -> None:
        """Undo ``isolate``."""
        if self._links is not None:
            self._links.rejoin(node)

    def seen(self, node: int) -> Mapping[str, Any]:
        """The engine's state of it, and the kernel's counts of its control group while it
        has one.
        """
        container = self._containers.container(node)
        try:
            with asking(f"say how node {node} is"):
                container.reload()
        except InfrastructureError as error:
            return {"state": "unknown", "why": error.message}
        state = container.attrs["State"]
        found = {
            "state": str(state["Status"]),
            "machine": str(container.id)[:12],
            "oom_killed": bool(state["OOMKilled"]),
        }
        if state["Status"] in ("exited", "dead"):
            found["exit_code"] = int(state["ExitCode"])
        counts = {
            "oom_kills": ("memory", "memory.events", r"^oom_kill (\d+)"),
            "throttled": ("cpu", "cpu.stat", r"^nr_throttled (\d+)"),
        }
        for name, (controller, file, pattern) in counts.items():
            match = re.search(pattern, self._group_file(node, controller, file), re.MULTILINE)
            found |= {name: int(match[1])} if match else {}
        return found

    def _tell(self, node: int, what: str) -> None:
        """Call a method of the node's container. Raises InfrastructureError, and ProcessLookupError
        for a node that was never started.
        """
        container = self._containers.container(node)
        with asking(f"{what} {container.name}"):
            getattr(container, what)()

    def _update(self, node: int, **limits: int) -> None:
        """Change the limits of a running node; an ended one has no limits."""
        container = self._containers.container(node)
        if self.seen(node)["state"] in ("running", "paused"):
            with asking(f"change the limits of {container.name}"):
                container.update(**limits)

    def _memory_used(self, node: int) -> int:
        text = self._group_file(node, "memory", "memory.current").strip()
        if text:
            return int(text)
        container = self._containers.container(node)
        with asking(f"say how much memory {container.name} uses"):
            return int(
                container.client.api.stats(container.id, stream=False, one_shot=True)[
                    "memory_stats"
                ]["usage"]
            )

    def _group_file(self, node: int, controller: str, file: str) -> str:
        """A file of its control group, version 2 or 1; "" if it cannot be read from here."""
        pid = self._containers.init_pid(node)
        if not pid:
            return ""
        try:
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controller in controllers.split(","):
                    return (_CGROUPS / controller / path.lstrip("/") / _V1[file]).read_text()
                if not controllers and (_CGROUPS / "cgroup.controllers").exists():
                    return (_CGROUPS / path.lstrip("/") / file).read_text()
        except OSError:
            pass
        return ""
