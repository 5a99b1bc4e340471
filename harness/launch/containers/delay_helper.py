"""Starts a helper inside a node that delays the packets of one source, if the kernel has no netem.
The helper itself is ``harness.launch.containers.delaying``.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.containers.inside import Inside

READY_LIMIT_S = 10.0
END_LIMIT_S = 2.0


def queue_of(address: str) -> int:
    """Number of the kernel's queue for packets of a source: the last two bytes of its address,
    which differ within one network.
    """
    third, fourth = address.split(".")[2:]
    return (int(third) << 8) | int(fourth)


class DelayHelper:
    """One helper for the packets of ``address`` in the namespace of ``inside``, ready to run.
    Raises RuntimeError.
    """

    def __init__(self, inside: Inside, address: str) -> None:
        self.process: subprocess.Popen[bytes] = inside.stay(
            [
                sys.executable,
                "-m",
                "trainchaos.harness.launch.containers.delaying",
                str(queue_of(address)),
            ]
        )
        assert self.process.stdout is not None
        ready = threading.Timer(READY_LIMIT_S, self.process.kill)
        ready.start()
        try:
            said = self.process.stdout.readline()
        finally:
            ready.cancel()
        if said != b"ready\n":
            self.end()
            raise RuntimeError(
                "packets cannot be delayed: the kernel supports neither user-space queues"
                "(NFQUEUE) nor netem"
            )

    def delay(self, shape: LinkShape) -> None:
        """Delay packets by ``shape`` from now on. Raises RuntimeError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{shape.delay_s} {shape.jitter_s}\n".encode())
            self.process.stdin.flush()
        except OSError as error:
            raise RuntimeError(
                f"the helper that delays packets is gone: {error.strerror}"
            ) from error

    def end(self) -> None:
        """Close its input to end it; the packets that it holds are let through."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_LIMIT_S)
