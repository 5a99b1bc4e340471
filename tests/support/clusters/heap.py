"""``python -m tests.support.clusters.heap MODULE ...`` runs a module that tells all the while how
many bytes it uses of its heap, in ``heap.PID`` of its working directory.

Resident memory would count what the allocators keep of freed memory too: after a moment of much use
up to 20 MiB more, for good.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
import threading
from pathlib import Path

BLOCK_BYTES = 64  # of Python's own small blocks, which the C library does not see; roughly
EVERY_S = 0.2
INTERNED = 60_000
"""Strings that are interned at the beginning, so that Python's table of them, two thirds full with
those of torch, does not double in the middle of a run: 1.8 MiB at once.
"""


class Mallinfo2(ctypes.Structure):
    """What the C library has given out, in bytes (mallinfo(3), glibc 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


LIBC = ctypes.CDLL(None)  # once: each is a cycle that the collector has to find
LIBC.mallinfo2.restype = Mallinfo2


def tell_heap(at: Path) -> None:
    """What is in use."""
    found = LIBC.mallinfo2()
    new = at.with_name(f"{at.name}.new")
    small = sys.getallocatedblocks() * BLOCK_BYTES
    new.write_text(str(found.uordblks + found.hblkhd + small))
    new.rename(at)


def main() -> None:
    """Run the module."""
    kept = [sys.intern(f"interned {number}") for number in range(INTERNED)]
    at, never = Path(f"heap.{os.getpid()}").resolve(), threading.Event()

    def tell() -> None:
        while not never.wait(EVERY_S):
            tell_heap(at)

    threading.Thread(target=tell, name="heap", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    del kept  # needed until now


if __name__ == "__main__":
    main()
