"""Acts on container nodes as a whole; implements ``harness.launch.launcher.MachineControl``.

A node is killed through the pidfd of its first process if there is one, which is quicker than
through the engine. Evidence on a node comes only from the engine and the kernel's counts, never
from this process.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.container_engine import asking
from trainchaos.harness.launch.cgroups import count_in, group_of
from trainchaos.harness.launch.containers.links import NodeLinks
from trainchaos.harness.launch.containers.node_container import NodeContainer

MIB = 1 << 20
PERIOD_US = 100_000
NO_LIMIT = 1 << 53  # bytes; the engine does not accept "none" as a change
LEAST_MIB = 6  # the smallest limit that a container may have
COUNTS = (("oom_kills", "memory", "oom_kill"), ("throttled", "cpu", "nr_throttled"))


class ContainerMachines:
    """``started``: the present container of a node, which raises ProcessLookupError for one that
    was never started; ``links``: drops the packets of a node that is cut off; ``memory_mib``,
    ``cores``: limits that every node has anyway, None: no limit.
    """

    can_pause = True

    def __init__(
        self,
        started: Callable[[int], NodeContainer],
        links: NodeLinks,
        memory_mib: int | None,
        cores: float | None,
    ) -> None:
        self._started = started
        self._links = links
        self._memory_mib = memory_mib
        self._cores = cores

    def kill(self, node: int) -> Mapping[str, Any]:
        """SIGKILL its first process: the kernel then kills the rest of its process namespace."""
        pidfd = self._started(node).pidfd
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
        if spare_mib is None:
            limit = NO_LIMIT if self._memory_mib is None else self._memory_mib * MIB
        else:
            limit = max(LEAST_MIB * MIB, self._memory_used(node) + spare_mib * MIB)
        self._update(node, mem_limit=limit, memswap_limit=limit)

    def limit_cores(self, node: int, cores: float | None) -> None:
        """Limit the container with a quota."""
        wanted = self._cores if cores is None else cores
        quota = -1 if wanted is None else max(1000, int(wanted * PERIOD_US))
        self._update(node, cpu_period=PERIOD_US, cpu_quota=quota)

    def isolate(self, node: int, *, outward: bool = True, inward: bool = True) -> None:
        """Drop packets in its network namespace: only traffic to itself passes. Raises
        RuntimeError.
        """
        self._links.isolate(node, outward=outward, inward=inward)

    def rejoin(self, node: int) -> None:
        """Undo ``isolate``."""
        self._links.rejoin(node)

    def seen(self, node: int) -> Mapping[str, Any]:
        """The engine's state of it, and the kernel's counts of its control group while it
        has one.
        """
        container = self._started(node).container
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
        for name, controller, kernels in COUNTS:
            group = self._group(node, controller)
            count = None if group is None else count_in(group, kernels)
            found |= {} if count is None else {name: count}
        return found

    def _tell(self, node: int, what: str) -> None:
        """Call a method of the node's container. Raises InfrastructureError, and ProcessLookupError
        for a node that was never started.
        """
        container = self._started(node).container
        with asking(f"{what} {container.name}"):
            getattr(container, what)()

    def _update(self, node: int, **limits: int) -> None:
        """Change the limits of a running node; an ended one has no limits."""
        container = self._started(node).container
        if self.seen(node)["state"] in ("running", "paused"):
            with asking(f"change the limits of {container.name}"):
                container.update(**limits)

    def _memory_used(self, node: int) -> int:
        if (group := self._group(node, "memory")) is not None:
            for file in ("memory.current", "memory.usage_in_bytes"):
                with contextlib.suppress(OSError):
                    return int((group / file).read_text())
        container = self._started(node).container
        with asking(f"say how much memory {container.name} uses"):
            return int(
                container.client.api.stats(container.id, stream=False, one_shot=True)[
                    "memory_stats"
                ]["usage"]
            )

    def _group(self, node: int, controller: str) -> Path | None:
        """Its control group; None if that cannot be read from here."""
        pid = self._started(node).live_pid
        with contextlib.suppress(OSError):
            return group_of(pid, controller) if pid else None
        return None
