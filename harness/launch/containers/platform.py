"""Nodes as containers: implements ``harness.launch.nodes.platform.Platform``.

Each node is one container with the agent as its first process, on the run's network, with an
address that it keeps when it restarts. An ended container stays until the restart or the end of the
run, since its exit is evidence. Nothing is privileged; ``NET_ADMIN`` is given only if a fault of
the run needs it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.base import Need
from trainchaos.harness.host.container_engine import (
    DIRECTORY_LABEL,
    HOLDER_LABEL,
    NODE_LABEL,
    RUN_LABEL,
    asking,
    connect,
    engine_url,
)
from trainchaos.harness.launch.containers.image import Image, bound, host_image, user_image
from trainchaos.harness.launch.containers.inside import ByEngine, ByNamespace, may_enter
from trainchaos.harness.launch.containers.links import BY_QUEUE, NodeAddress, NodeLinks
from trainchaos.harness.launch.containers.machines import PERIOD_US, ContainerMachines
from trainchaos.harness.launch.containers.network import ContainerNetwork, make_network
from trainchaos.harness.launch.containers.node_container import NodeContainer, remove
from trainchaos.harness.launch.containers.settings import Settings
from trainchaos.harness.launch.nodes.platform import Platform, PlatformNeeds, Will
from trainchaos.harness.launch.storage import mount
from trainchaos.harness.undo.base import mounts
from trainchaos.harness.undo.containers import RemoveContainers, RemoveNetworks
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.live import HarnessProcess
from trainchaos.harness.undo.records import MARKER, Unmount

MIB = 1 << 20
NET_ADMIN_FOR = frozenset({Need.LINKS, Need.MACHINES})
"""Needs whose faults change devices, queues or filters inside a node."""
PROPAGATION = "rslave"
"""For a bind of such a directory: mounts propagate into the container, but not out of it."""
_BIND, _REC, _SHARED = 4096, 16384, 1 << 20


class DockerPlatform(Platform):
    """The containers and the network of one run. Raises InfrastructureError if the engine
    refuses.
    """

    def __init__(self, wanted: PlatformNeeds, settings: Settings) -> None:
        self.client = connect()
        self.run = os.environ[MARKER]
        self.name = f"chaos-{re.sub(r'[^A-Za-z0-9_.-]', '-', wanted.run.root.name)}-{self.run[-6:]}"
        self._wanted, self._settings = wanted, settings
        self._labels = {
            RUN_LABEL: self.run,
            DIRECTORY_LABEL: str(wanted.run.root.resolve()),
            HOLDER_LABEL: HarnessProcess.me(self.run).model_dump_json(),
        }
        self._undo = (
            RemoveContainers(engine=engine_url(), run=self.run),
            RemoveNetworks(engine=engine_url(), run=self.run),
        )
        self._records = [wanted.will(undo) for undo in self._undo]
        self._ledger = Ledger(wanted.run.ledger)
        self._nodes: dict[int, NodeContainer] = {}
        self._lives: dict[int, int] = {}
        self._lock = threading.Lock()  # a lost node restarts on a separate thread
        self._root = wanted.run.root.resolve()
        self._shared: SharedDirectory | None = None
        self.links = self._links = NodeLinks(self._place, self.address)
        self.machines = ContainerMachines(
            self._started, self._links, settings.memory_mib, settings.cpus
        )
        self.emulates = (
            "nodes are containers of one machine: they share its processors, disk and clock"
        )
        if Need.LINKS in wanted.needs and not self._links.has_netem():
            self.emulates += f"; a link's delay would be by {BY_QUEUE}"
        try:
            if Need.MOUNT in wanted.needs:
                self._shared = SharedDirectory(self._root, wanted.will)
            self._image = self._find_image()
            self._network = make_network(
                self.client,
                self.name,
                labels=self._labels,
                seed=self.run,
                nodes=wanted.nodes,
                subnet=settings.subnet,
                outside=settings.outside,
            )
            self.host = self._network.gateway
        except BaseException:
            self.close()
            raise

    @property
    def network(self) -> ContainerNetwork:
        """The run's network."""
        return self._network

    @property
    def container_image(self) -> str:
        """The id of the nodes' image."""
        return self._image.id

    @property
    def net_admin(self) -> bool:
        """Whether nodes need NET_ADMIN because this process cannot enter their namespaces."""
        return bool(self._wanted.needs & NET_ADMIN_FOR) and not may_enter()

    @property
    def nodes(self) -> int:
        """The maximum number of nodes."""
        return self._wanted.nodes

    def address(self, node: int) -> str:
        """The node's address, fixed for the whole run."""
        return self._network.address(node)

    def container(self, node: int) -> Any:
        """The present container of a node. Raises ProcessLookupError if it was never started."""
        return self._started(node).container

    def init_pid(self, node: int) -> int:
        """Pid of a node's first process on this machine; 0 if unknown or if it has ended. Raises
        ProcessLookupError.
        """
        return self._started(node).live_pid

    def _place(self, node: int) -> NodeAddress | None:
        """The node's address and access to its namespace, None if it is not alive."""
        with self._lock:
            found = self._nodes.get(node)
        if found is None or found.ended:
            return None
        pid, container, python = found.pid, found.container, self._image.python
        enter = pid > 0 and may_enter()
        return NodeAddress(
            address=self.address(node),
            life=found.life,
            open=lambda: ByNamespace(pid) if enter else ByEngine(container, python),
        )

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a container for the node; the previous one is removed."""
        with self._lock:
            before = self._nodes.pop(node, None)
            life = self._lives[node] = self._lives.get(node, 0) + 1
        if before is not None:
            before.keep_output(node, self._root / "nodes")
            before.close()
            with asking(f"remove the lost node {before.container.name}"):
                remove(before.container)
        name = f"{self.name}-n{node}"
        with asking(f"start node {node} as {name}"):
            made = self.client.containers.create(
                **self._container(node, name, command, environment)
            )
            try:
                made.start()
                made.reload()
            except BaseException:
                remove(made)  # a retry needs its name
                raise
        found = NodeContainer.of(made, life=life)
        with self._lock:
            self._nodes[node] = found
        self._links.renewed(node)

    def gone(self, node: int) -> str | None:
        """Why the node is gone, by the pidfd of its first process; the engine is queried only
        without one.
        """
        with self._lock:
            found = self._nodes.get(node)
        if found is None:
            return "it has no container"
        return found.why_ended() if found.ended else None

    def close(self) -> Sequence[str]:
        """Remove containers and network; the agents' output is kept in the run's directory."""
        self._links.close()
        with self._lock:
            nodes, self._nodes = self._nodes, {}
        for node, found in nodes.items():
            found.keep_output(node, self._root / "nodes")
            found.close()
        left = []
        for undo, record in zip(self._undo, self._records, strict=True):
            outcome = undo.undo()
            (self._ledger.undone if outcome.ok else self._ledger.failed)(record, outcome.text)
            left += [] if outcome.ok else [outcome.text]
        left += filter(None, [self._shared.close() if self._shared else ""])
        self.client.close()
        return left

    def _find_image(self) -> Image:
        name = self._settings.image
        if name:
            found = user_image(
                self.client,
                name,
                self._settings.python,
                mounts=self._settings.mounts,
                labels=self._labels,
            )
        else:
            found = host_image(self.client)
        return replace(found, binds=[*found.binds, *self._settings.mounts])

    def _container(
        self, node: int, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> dict[str, Any]:
        from docker.types import Ulimit

        settings, image, root = self._settings, self._image, str(self._root)
        binds = bound(image.binds)
        binds[root] = {"bind": root, "mode": f"rw,{PROPAGATION}" if self._shared else "rw"}
        return {
            "image": image.id,
            "entrypoint": [image.python],
            "command": list(command[1:]),
            "name": name,
            "hostname": f"n{node}",
            "labels": {**self._labels, NODE_LABEL: str(node)},
            "detach": True,
            "environment": {**image.environment, **environment, MARKER: self.run},
            "user": f"{os.getuid()}:{os.getgid()}",
            "working_dir": "/tmp",
            "volumes": binds,
            "network": self._network.name,
            "networking_config": {self._network.name: self._endpoint(node)},
            "dns_opt": ["timeout:1", "attempts:1"],
            "extra_hosts": self._names(),
            "shm_size": settings.shm_mib * MIB,
            # This flag would take all capabilities from commands that the engine runs as root in
            # another user's container.
            "security_opt": [] if self.net_admin else ["no-new-privileges"],
            "cap_drop": ["MKNOD", "NET_RAW"],
            "cap_add": ["NET_ADMIN"] if self.net_admin else [],
            # As a quota: nano_cpus could not be changed while the node runs.
            "cpu_period": PERIOD_US,
            "cpu_quota": None if settings.cpus is None else int(settings.cpus * PERIOD_US),
            "mem_limit": None if settings.memory_mib is None else settings.memory_mib * MIB,
            "ulimits": [Ulimit(name="memlock", soft=-1, hard=-1)] if settings.gpus else [],
            "device_requests": _gpus(settings.gpus, node),
        }

    def _names(self) -> dict[str, str]:
        """Names for all addresses of the run, also for IPv4 mapped to IPv6: a script's torch looks
        up the name of every address it connects to, and would wait for a name server that may not
        exist.
        """
        names = {
            "harness": self.host,
            **{f"n{node}": self.address(node) for node in range(self.nodes)},
        }
        return names | {f"{name}-mapped": f"::ffff:{address}" for name, address in names.items()}

    def _endpoint(self, node: int) -> Any:
        """The node's own address on the run's network."""
        return self.client.api.create_endpoint_config(
            ipv4_address=self.address(node), aliases=[f"n{node}"]
        )

    def _started(self, node: int) -> NodeContainer:
        with self._lock:
            found = self._nodes.get(node)
        if found is None:
            raise ProcessLookupError(f"node {node} has no container")
        return found


def _gpus(gpus: int | str, node: int) -> list[Any]:
    from docker.types import DeviceRequest

    if not gpus:
        return []
    if gpus == "all":
        return [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    first = int(gpus) * node
    ids = [str(index) for index in range(first, first + int(gpus))]
    return [DeviceRequest(device_ids=ids, capabilities=[["gpu"]])]


class SharedDirectory:
    """A directory shared until ``close``. Raises InfrastructureError if it cannot be mounted."""

    def __init__(self, path: Path, will: Will) -> None:
        self._undo = Unmount(path=path, source=_source(path))
        will(self._undo)
        try:
            mount(str(path), path, _BIND | _REC)
            mount("none", path, _SHARED | _REC)
        except OSError as error:
            self.close()
            raise InfrastructureError(
                f"cannot share mounts below {path} with containers: {error.strerror}",
                hint="mounting needs root",
            ) from error

    def close(self) -> str:
        """Unmount it; safe to repeat. Returns an error message, or ""."""
        outcome = self._undo.undo()
        return "" if outcome.ok else outcome.text


def _source(path: Path) -> str:
    """Mountinfo's source of the device that a path is on; a bind of the path has the same
    source.
    """
    above = [(place, source) for place, source in mounts() if path.is_relative_to(place)]
    longest = max(len(place) for place, _ in above)
    return [source for place, source in above if len(place) == longest][-1]
