"""Recovers what a lost node leaves where its coordinator can read it: event logs, and the rest of
them in memory that ranks shared with their agent, where both were on the coordinator's machine
(nodes that are containers).

A node on another machine leaves only what had reached a shared file system.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing, suppress
from pathlib import Path

from trainchaos.recovery.process.local import memory_beside
from trainchaos.recovery.transport import progress_counters


def gather(log: Path, kept: Path) -> None:
    """Complete ``kept``, the part of an event log that the agent had forwarded. ``log``: the one on
    the node. Parts that no longer exist are left out: gaps in the sequence numbers show it. Raises
    OSError when ``kept`` cannot be written.
    """
    with suppress(FileNotFoundError), open(log, "rb") as source, open(kept, "ab") as target:
        source.seek(target.tell())
        shutil.copyfileobj(source, target)
    memory = memory_beside(log)
    try:
        fd = os.open(memory, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        with closing(progress_counters.ring_of(fd)) as ring:
            ring.salvage(kept)
    finally:
        os.close(fd)
