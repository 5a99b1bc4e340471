"""The resources of this machine: CUDA devices through NVML, cores, memory. Never imports torch."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from trainchaos.chaos.scenario.model import Cell, WorkloadSpec
from trainchaos.harness.host.slurm_facts import facts
from trainchaos.harness.launch.capabilities import unmet
from trainchaos.recovery.health.reputation import Reputation
from trainchaos.recovery.policy.jobconfig import Exchange, exchange_of

ON_NODE = "@n"


def cuda_devices() -> list[str]:
    """Names of the NVIDIA devices, from NVML; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def missing(cell: Cell) -> str | None:
    """A requirement of a cell that this machine does not meet, or None."""
    needs, devices = cell.scenario.requires, cuda_devices()
    workload = cell.scenario.workload
    on_gpus = workload.device == "cuda" or workload.backend == "nccl"
    wanted = max(needs.cuda_devices, 1 if on_gpus else 0)
    if len(devices) < wanted:
        return f"needs {wanted} CUDA devices, this machine has {len(devices)}"
    cores = os.cpu_count() or 1
    if cores < needs.cores:
        return f"needs {needs.cores} cores, this machine has {cores}"
    if memory_gib() < needs.memory_gib:
        return f"needs {needs.memory_gib:g} GiB of memory, this machine has {memory_gib():.1f}"
    return unmet(needs)


def placement(workload: WorkloadSpec, devices: int, spares: int) -> tuple[list[str], Exchange]:
    """Devices to hand out, and the exchange: as the workload says, else NCCL if every process gets
    its own GPU. Spares count: a spare waits on the GPU it will train on.
    On CPU there is one emulated slot per process that the job starts with, so that losing a device
    means the same there.
    """
    if workload.device == "cpu" or not devices:
        return slots(workload.ranks + spares), Exchange("gloo")
    own = devices >= workload.ranks + spares
    names = [f"cuda:{index}" for index in range(devices)]
    return names, exchange_of(workload.backend, own_gpus=own)


def slots(count: int) -> list[str]:
    """Names of ``count`` emulated devices."""
    return [f"cpu:{index}" for index in range(count)]


def torch_name(place: str) -> str:
    """Torch's name of a device that was handed out."""
    return "cpu" if place.startswith("cpu") else place.partition(ON_NODE)[0]


def on_node(place: str, node: int) -> str:
    """A cluster-wide name of a node's device: ``cuda:0@n1``."""
    return f"{place}{ON_NODE}{node}"


class DeviceBoard:
    """Tracks which process is on which device, and which devices are refused. ``places_on``: names
    of a node's devices; one name is always the same device; ``tainted``: some of them.
    """

    def __init__(
        self,
        places_on: Callable[[int], Sequence[str]],
        nodes: Collection[int] = (0,),
        *,
        tainted: Collection[str] = (),
        reputation: Reputation | None = None,
    ) -> None:
        self._places_on = places_on
        self._nodes = nodes
        self._refused: set[str] = set()
        self._tainted = tainted
        self._reputation = reputation or Reputation(time.monotonic)
        self._device_of: dict[str, str] = {}

    def takes(self, node: int) -> bool:
        """Whether a node has a device that is not refused."""
        return bool(self._free(node))

    def assign(self, process: str, living: Collection[str], node: int = 0) -> str:
        """The device for a process about to start on a node: of those not refused, and neither
        tainted nor about to fail where there are others, the one with the fewest living processes,
        the first of equals, so that a replacement gets the lost rank's device. One that is suspect
        comes last, but a GPU is not shared for that, since NCCL refuses two ranks on one.
        """
        taken = [device for name, device in self._device_of.items() if name in living]
        free = self._free(node)
        device = min(
            free,
            key=lambda place: (
                place in self._tainted or self._reputation.about_to_fail((node, place)),
                taken.count(place) if place.startswith("cuda") else 0,
                self._reputation.suspect((node, place)),
                taken.count(place),
                free.index(place),
            ),
        )
        self._device_of[process] = device
        return device

    def device_of(self, process: str) -> str | None:
        """The device that a process was started on."""
        return self._device_of.get(process)

    def refuse(self, process: str) -> str:
        """Refuse new processes on a process's device, and return its name. Raises RuntimeError if
        it is the last device.
        """
        device = self._device_of[process]
        others = {place for node in self._nodes for place in self._free(node)} - {device}
        if not others:
            raise RuntimeError(f"{device} is the last device there is")
        self._refused.add(device)
        return device

    def distrusts(self, node: int) -> bool:
        """Whether each device that a node has left is suspect."""
        return all(self._reputation.suspect((node, place)) for place in self._free(node))

    def accept(self, process: str) -> None:
        """Admit new processes on its device again."""
        self._refused.discard(self._device_of[process])

    def _free(self, node: int) -> list[str]:
        return [place for place in self._places_on(node) if place not in self._refused]


def memory_gib() -> float:
    """Memory of the machine, in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def processor() -> str:
    """Model name of the processor from Linux, or else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def versions() -> dict[str, str]:
    """Versions of the software that matters."""
    found = {}
    for name in ("trainchaos", "torch", "numpy", "pydantic", "xxhash"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def describe() -> dict[str, Any]:
    """The machine and the versions that matter, for ``system.json``."""
    return {
        "host": platform.node(),
        "kernel": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory_gib(), 1),
        "cuda_devices": cuda_devices(),
        "versions": versions(),
        **facts(os.environ),
    }
