"""What this machine has: CUDA devices through NVML, cores, memory. Never imports torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from chaos.scenario import Cell, WorkloadSpec
from harness.capabilities import unmet


def cuda_devices() -> list[str]:
    """Names of the NVIDIA devices, by NVML; none where there is no driver."""
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
    """What a cell requires and this machine lacks, or None."""
    needs, devices = cell.scenario.requires, cuda_devices()
    wanted = max(needs.cuda_devices, 1 if cell.scenario.workload.device == "cuda" else 0)
    if len(devices) < wanted:
        return f"needs {wanted} CUDA devices, this machine has {len(devices)}"
    cores = os.cpu_count() or 1
    if cores < needs.cores:
        return f"needs {needs.cores} cores, this machine has {cores}"
    if memory_gib() < needs.memory_gib:
        return f"needs {needs.memory_gib:g} GiB of memory, this machine has {memory_gib():.1f}"
    return unmet(needs)


def placement(workload: WorkloadSpec, devices: int, spares: int) -> tuple[list[str], str]:
    """Devices to deal out, and the backend: NCCL where every process gets a GPU of its own, gloo otherwise.

    NCCL refuses two ranks on one GPU, so spares count: a spare waits on the GPU it will train on.
    """
    if workload.device == "cpu" or not devices:
        return ["cpu"], "gloo"
    return [
        f"cuda:{index}" for index in range(devices)
    ], "nccl" if devices >= workload.ranks + spares else "gloo"


def least_used(places: Sequence[str], taken: Sequence[str]) -> str:
    """The device with the fewest living processes on it, the first of equals: a replacement gets the lost rank's."""
    return min(places, key=lambda place: (taken.count(place), places.index(place)))


def memory_gib() -> float:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def describe() -> dict[str, Any]:
    """The machine and the versions that matter, for ``system.json``."""
    versions = {}
    for name in ("trainchaos", "torch", "numpy", "pydantic", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "host": platform.node(),
        "kernel": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory_gib(), 1),
        "cuda_devices": cuda_devices(),
        "versions": versions,
    }
