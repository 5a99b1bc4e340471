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
    "pandas",
    "matplotlib",
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


def _finding(name: str, said: str, todo: str = "", *, broken: bool = False) -> MachineFinding:
    state: State = "broken" if broken else "missing" if todo else "ready"
    return MachineFinding(name=name, state=state, said=said, todo=todo)


def _python() -> MachineFinding:
    said = f"Python {platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < LEAST_PYTHON:
        return _finding("python", said, "use Python 3.11 or newer", broken=True)
    if sys.platform != "linux":
        todo = "real runs need Linux; launcher sim works anywhere"
        return _finding("python", f"{said}, {sys.platform}", todo)
    return _finding("python", said)


def _torch() -> MachineFinding:
    """Read from its metadata: importing torch takes seconds."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        todo = "install chaos with its dependencies"
        return _finding("torch", "it is not installed", todo, broken=True)
    found = re.match(r"\d+\.\d+", version)
    tried = found is not None and found[0] in TRIED_TORCH
    todo = f"never tried: chaos was with torch {', '.join(TRIED_TORCH)} (docs/torch.md)"
    return _finding("torch", f"torch {version}", "" if tried else todo)


def _packages() -> MachineFinding:
    lost = [name for name in NEEDED if not _installed(name)]
    if lost:
        todo = "install chaos with its dependencies"
        return _finding("packages", f"{', '.join(lost)} not installed", todo, broken=True)
    return _finding("packages", "all that chaos needs is installed")


def _cores() -> MachineFinding:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    said = f"{usable} of {there} cores may be used" if usable < there else f"{there} cores"
    todo = "steps of several ranks take turns on one core: expect slow runs" if usable < 2 else ""
    return _finding("cores", said, todo)


def _memory() -> MachineFinding:
    size = memory_gib()
    todo = "four ranks that have loaded torch need about 3 GiB" if size < LEAST_MEMORY_GIB else ""
    return _finding("memory", f"{size:.1f} GiB", todo)


def _disk(directory: Path) -> MachineFinding:
    there = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(there).free / 2**30
    todo = f"free disk space below {there}" if free < LEAST_DISK_GIB else ""
    if not os.access(there, os.W_OK):
        todo = f"this user may not write to {there}: say --runs"
    return _finding("disk", f"{free:.0f} GiB free at {there}", todo)


def _gpus() -> MachineFinding:
    if found := cuda_devices():
        return _finding("gpus", ", ".join(found))
    todo = "only device: cuda and the faults of real GPUs need one"
    return _finding("gpus", "no NVIDIA GPU", todo)


def _probe(name: str) -> MachineFinding:
    why = PROBES[name]()
    return _finding(name, _WHAT[name]) if why is None else _finding(name, why, _HINTS[name])


def _links() -> MachineFinding:
    """Between containers; the proxy of launcher local needs nothing."""
    why = lacks_links()
    if why is not None:
        return _finding("links", why, "only real links between containers need it")
    tools = ", ".join(path for path in map(shutil.which, ("tc", "nft")) if path)
    said = f"links between containers can be shaped ({tools or 'by their own tools'})"
    return _finding("links", said)


def _names() -> MachineFinding:
    slowest_s = dns_check.slowest_lookup_s()
    if slowest_s <= dns_check.SLOW_S:
        said = f"looking up {dns_check.ADDRESS} takes {slowest_s:.2g} s at the most"
        return _finding("names", said)
    said = f"looking up {dns_check.ADDRESS} took {slowest_s:.2g} s or more"
    todo = f"stacks and scripts that connect by themselves wait for it: {dns_check.REMEDY}"
    return _finding("names", said, todo)


def _slurm() -> MachineFinding:
    if not installed():
        return _finding("slurm", "its commands are not in PATH", "only launcher slurm needs it")
    job = os.environ.get("SLURM_JOB_ID")
    said = f"in job {job}" if job else "its commands are here; this is not in a job"
    todo = "" if job else "launcher slurm runs in an allocation: salloc or sbatch"
    return _finding("slurm", said, todo)


def _stacks() -> Iterator[MachineFinding]:
    for name in environments.stacks():
        found = environments.look(name)
        versions = [f"{package} {version}" for package, version in [*found.versions.items()][:4]]
        said = ", ".join(versions) if found.ready else found.why
        todo = "" if found.ready else f"chaos stacks install {name}"
        yield _finding(f"stack {name}", said, todo)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
