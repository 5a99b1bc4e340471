"""Acts of faults on a rank's own process and device, from inside."""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from trainchaos import beacon
from trainchaos.chaos.fault.targets import BROKEN_DEVICE, EMULATED, NO_DEVICE_MEMORY

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job

CLOCK_KHZ = 1_500_000
LOOK_S = 0.02


class DeviceError(RuntimeError):
    """Raised by operations on a device that emulates a sticky error."""


class BodyShim:
    """Implements ``chaos.fault.targets.Body`` for a real rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._skipping = 0  # generation whose collectives are skipped
        self.broken = False

    def check(self) -> None:
        """Raise DeviceError if the (emulated) device is broken."""
        if self.broken:
            raise DeviceError(EMULATED + BROKEN_DEVICE)

    def segfault(self) -> None:
        ctypes.string_at(0)

    def hold_interpreter(self, seconds: float) -> None:
        """See chaos.fault.targets.Body. A call through PyDLL keeps the interpreter's lock; a signal
        may end it early.
        """
        libc = ctypes.PyDLL(None)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            libc.poll(None, 0, max(1, int(left * 1000)))

    def block(self, seconds: float) -> None:
        """See chaos.fault.targets.Body: a spinning kernel with CUDA, otherwise a C call without the
        lock.
        """
        if self._on_cuda():
            _spin(seconds, self._job.device)
            return
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(left)

    def hang(self, how: str, seconds: float) -> str:
        """See chaos.fault.targets.Body. The act can only be logged afterwards, if it ends."""
        if how == "kernel" and self._on_cuda():
            _spin(seconds, self._job.device)
            return "kernels that spin"
        return beacon.hang(how, seconds)

    def leave_out_collective(self) -> None:
        self._skipping = self._job.generation
        self._job.reducer.instead = self._instead

    def _instead(self) -> NeverWork | None:
        if self._job.generation == self._skipping:
            return NeverWork(self._job)
        self._job.reducer.instead = None
        return None

    def break_device(self) -> str:
        """See chaos.fault.targets.Body. Never by a device assert: with MPS that would hit other
        users of the GPU.
        """
        self.broken = True
        return "emulated"

    def exhaust_device(self) -> None:
        """See chaos.fault.targets.Body. On CUDA the allocator itself refuses; elsewhere its
        exception is raised.
        """
        import torch

        if self._on_cuda():
            _, total = torch.cuda.mem_get_info(self._job.device)
            torch.empty(2 * total, dtype=torch.uint8, device=self._job.device)
        raise torch.OutOfMemoryError(EMULATED + NO_DEVICE_MEMORY)

    def hog(self, at_most_mib: int) -> None:
        """Start a thread that allocates up to ``at_most_mib``, or until the kernel kills the
        process.
        """
        threading.Thread(target=_take, args=(at_most_mib,), name="memory-hog", daemon=True).start()

    def _on_cuda(self) -> bool:
        import torch

        return torch.cuda.is_available() and self._job.device.startswith("cuda")


class NeverWork:
    """Replaces a collective that never started: waiting for it ends only with the generation."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait. Raises RuntimeError at the timeout, GenerationLost if the generation is aborted."""
        deadline = time.monotonic() + (
            timeout.total_seconds() if timeout is not None else float("inf")
        )
        while time.monotonic() < deadline:
            self._job.check()
            time.sleep(LOOK_S / 4)
        raise RuntimeError("timed out: the collective was never entered")

    def is_completed(self) -> bool:
        """Never."""
        return False


def _take(at_most_mib: int) -> None:
    taken = []
    for _ in range(at_most_mib):
        taken.append(bytearray(1 << 20))  # written to, so that the kernel must provide the memory


def _spin(seconds: float, device: str) -> None:
    """Keep a device's stream busy for ``seconds``, in slices so that no kernel runs for minutes,
    and wait.
    """
    import torch

    # Not every torch for CUDA 13 gives the clock rate; slices then have roughly the right length.
    khz = getattr(torch.cuda.get_device_properties(device), "clock_rate", CLOCK_KHZ)
    deadline = time.monotonic() + seconds
    with torch.cuda.device(device):
        while time.monotonic() < deadline:
            torch.cuda._sleep(int(khz * 1000 * min(1.0, seconds)))
            torch.cuda.current_stream(device).synchronize()
