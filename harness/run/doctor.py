"""Checks this machine for chaos runs: one finding for each part, with what to do where something is
missing.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from trainchaos.harness.compare.environments import environments
from trainchaos.harness.host import dns_check
from trainchaos.harness.host.slurm_commands import installed
from trainchaos.harness.launch.capabilities import PROBES
from trainchaos.harness.launch.containers.links import lacks_links
from trainchaos.harness.launch.devices import cuda_devices, memory_gib

State = Literal["ready", "missing", "broken"]
"""``missing``: something that some runs need; ``broken``: nothing works without it."""
LEAST_PYTHON = (3, 11)
TRIED_TORCH = ("2.11", "2.13", "2.14", "2.15")
LEAST_MEMORY_GIB = 3.0
LEAST_DISK_GIB = 2.0
NEEDED = (
    "numpy",
    "xxhash",
    "pydantic",
    "ruamel.yaml",
    "click",
    "rich",
    "jinja2",
)
_ROOT_HINT = "run chaos as root for the faults that need it; chaos list faults -v shows them"
_HINTS: Mapping[str, str] = {
    "root": _ROOT_HINT,
    "net_admin": _ROOT_HINT,
    "mount": "faults of the disk need it: run chaos as root",
    "cgroup": (
        "faults of memory and processor time need it: run chaos as root, with /sys/fs/cgroup"
        " writable"
    ),
    "docker": "only launcher docker needs it",
}
_WHAT: Mapping[str, str] = {
    "root": "this user is root",
    "net_admin": "network devices can be changed",
    "mount": "file systems can be mounted",
    "cgroup": "control groups can be made",
    "docker": "a Docker engine answers",
}


@dataclass(frozen=True, kw_only=True)
class MachineFinding:
    """``said``: what was found; ``todo``: what to do about it, "" where no action is needed."""

    name: str
    state: State
    said: str
    todo: str = ""


def examine(directory: Path) -> list[MachineFinding]:
    """Check everything. ``directory``: where runs would be stored."""
    return [
        _python(),
        _torch(),
        _packages(),
        _cores(),
        _memory(),
        _disk(directory),
        _gpus(),
        *(_probe(name) for name in PROBES),
        _links(),
        _names(),
        _slurm(),
        *_stacks(),
    ]


def _python() -> MachineFinding:
    said = f"Python {platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < LEAST_PYTHON:
        return MachineFinding(
            name="python", state="broken", said=said, todo="use Python 3.11 or newer"
        )
    if sys.platform != "linux":
        todo = "real runs need Linux; launcher sim works anywhere"
        return MachineFinding(
            name="python", state="missing", said=f"{said}, {sys.platform}", todo=todo
        )
    return MachineFinding(name="python", state="ready", said=said)


def _torch() -> MachineFinding:
    """Read from its metadata: importing torch takes seconds."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return MachineFinding(
            name="torch",
            state="broken",
            said="it is not installed",
            todo="install chaos with its dependencies",
        )
    found = re.match(r"\d+\.\d+", version)
    if found is None or found[0] not in TRIED_TORCH:
        todo = f"never tried: chaos was with torch {', '.join(TRIED_TORCH)} (docs/torch.md)"
        return MachineFinding(name="torch", state="missing", said=f"torch {version}", todo=todo)
    return MachineFinding(name="torch", state="ready", said=f"torch {version}")


def _packages() -> MachineFinding:
    lost = [name for name in NEEDED if not _installed(name)]
    if lost:
        todo = "install chaos with its dependencies"
        return MachineFinding(
            name="packages", state="broken", said=f"{', '.join(lost)} not installed", todo=todo
        )
    return MachineFinding(name="packages", state="ready", said="all that chaos needs is installed")


def _cores() -> MachineFinding:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    said = f"{usable} of {there} cores may be used" if usable < there else f"{there} cores"
    todo = "steps of several ranks take turns on one core: expect slow runs" if usable < 2 else ""
    return MachineFinding(name="cores", state="missing" if todo else "ready", said=said, todo=todo)


def _memory() -> MachineFinding:
    size = memory_gib()
    todo = "four ranks that have loaded torch need about 3 GiB" if size < LEAST_MEMORY_GIB else ""
    return MachineFinding(
        name="memory", state="missing" if todo else "ready", said=f"{size:.1f} GiB", todo=todo
    )


def _disk(directory: Path) -> MachineFinding:
    there = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(there).free / 2**30
    todo = f"free disk space below {there}" if free < LEAST_DISK_GIB else ""
    if not os.access(there, os.W_OK):
        todo = f"this user may not write to {there}: say --runs"
    return MachineFinding(
        name="disk",
        state="missing" if todo else "ready",
        said=f"{free:.0f} GiB free at {there}",
        todo=todo,
    )


def _gpus() -> MachineFinding:
    found = cuda_devices()
    if found:
        return MachineFinding(name="gpus", state="ready", said=", ".join(found))
    return MachineFinding(
        name="gpus",
        state="missing",
        said="no NVIDIA GPU",
        todo="only device: cuda and the faults of real GPUs need one",
    )


def _probe(name: str) -> MachineFinding:
    why = PROBES[name]()
    if why is None:
        return MachineFinding(name=name, state="ready", said=_WHAT[name])
    return MachineFinding(name=name, state="missing", said=why, todo=_HINTS[name])


def _links() -> MachineFinding:
    """Between containers; the proxy of launcher local needs nothing."""
    why = lacks_links()
    if why is not None:
        return MachineFinding(
            name="links",
            state="missing",
            said=why,
            todo="only real links between containers need it",
        )
    tools = ", ".join(path for path in map(shutil.which, ("tc", "nft")) if path)
    said = f"links between containers can be shaped ({tools or 'by their own tools'})"
    return MachineFinding(name="links", state="ready", said=said)


def _names() -> MachineFinding:
    slowest_s = dns_check.slowest_lookup_s()
    if slowest_s <= dns_check.SLOW_S:
        said = f"looking up {dns_check.ADDRESS} takes {slowest_s:.2g} s at the most"
        return MachineFinding(name="names", state="ready", said=said)
    said = f"looking up {dns_check.ADDRESS} took {slowest_s:.2g} s or more"
    todo = f"stacks and scripts that connect by themselves wait for it: {dns_check.REMEDY}"
    return MachineFinding(name="names", state="missing", said=said, todo=todo)


def _slurm() -> MachineFinding:
    if not installed():
        todo = "only launcher slurm needs it"
        return MachineFinding(
            name="slurm", state="missing", said="its commands are not in PATH", todo=todo
        )
    job = os.environ.get("SLURM_JOB_ID")
    said = f"in job {job}" if job else "its commands are here; this is not in a job"
    todo = "" if job else "launcher slurm runs in an allocation: salloc or sbatch"
    return MachineFinding(name="slurm", state="ready" if job else "missing", said=said, todo=todo)


def _stacks() -> Iterator[MachineFinding]:
    for name in environments.stacks():
        found = environments.look(name)
        versions = ", ".join(
            f"{package} {version}" for package, version in list(found.versions.items())[:4]
        )
        if found.ready:
            yield MachineFinding(name=f"stack {name}", state="ready", said=versions)
        else:
            yield MachineFinding(
                name=f"stack {name}",
                state="missing",
                said=found.why,
                todo=f"chaos stacks install {name}",
            )


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
