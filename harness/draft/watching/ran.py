"""Reads the command lines and the environments of the processes that a command started."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from trainchaos.harness.script.processes import tree

MOST = 200
"""Different command lines that are kept."""
LONGEST = 1 << 16  # bytes of a command line
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")

Ran = Mapping[tuple[str, ...], Path]
"""Words of processes -> the directory that each had, parents before their children."""


def running(pids: Iterable[int]) -> Ran:
    """Of these processes, as far as this user may see."""
    found: dict[tuple[str, ...], Path] = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as stream:
                raw = stream.read(LONGEST)
            place = Path(os.readlink(f"/proc/{pid}/cwd"))
        except OSError:
            continue
        words = tuple(
            word.decode(errors="replace") for word in raw.removesuffix(b"\0").split(b"\0")
        )
        if words[0] and len(found) < MOST:
            found.setdefault(words, place)
    return MappingProxyType(found)


def rendezvous(pids: Iterable[int], ours: Mapping[str, str]) -> dict[str, str]:
    """Where ranks meet, by the environment of the first process that says so and did not inherit
    it.
    """
    for pid in pids:
        env = tree.environment(pid)
        if all(name in env for name in RENDEZVOUS):
            found = {name: env[name] for name in RENDEZVOUS}
            if any(ours.get(name) != value for name, value in found.items()):
                return found
    return {}
