"""Acts of faults on a simulated rank's own process and device, from inside."""

from __future__ import annotations

import signal
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.fault.targets import BROKEN_DEVICE, EMULATED, NO_DEVICE_MEMORY
from trainchaos.harness.sim.world.clock import NS_PER_S
from trainchaos.harness.sim.world.process import Killed

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank

LOOK_NS = NS_PER_S // 100


class OutOfMemoryError(RuntimeError):
    """The counterpart of torch's."""


class DeviceError(RuntimeError):
    """The counterpart of the one in ``harness.rank.shims.body``."""


class SimBody:
    """Implements ``chaos.fault.targets.Body``."""

    def __init__(self, job: SimRank) -> None:
        self._job = job
        self._skipping = 0
        self._blocked_ns = 0.0
        self.broken = False

    @property
    def active(self) -> bool:
        """Whether collectives are skipped."""
        return self._skipping > 0

    def check(self) -> None:
        """Raise if the device is broken."""
        if self.broken:
            from trainchaos.harness.sim.rank.faults import TrainingError

            raise TrainingError(DeviceError(EMULATED + BROKEN_DEVICE))

    def segfault(self) -> None:
        raise Killed(signal.SIGSEGV)

    def hold_interpreter(self, seconds: float) -> None:
        self._job.process.freeze(seconds * NS_PER_S)
        self._blocked_ns = seconds * NS_PER_S

    def block(self, seconds: float) -> None:
        self._blocked_ns = seconds * NS_PER_S

    def hang(self, how: str, seconds: float) -> str:
        self.block(seconds)
        return f"simulated {how}"

    def leave_out_collective(self) -> None:
        self._skipping = self._job.generation

    def break_device(self) -> str:
        self.broken = True
        return "emulated"

    def exhaust_device(self) -> None:
        raise OutOfMemoryError(EMULATED + NO_DEVICE_MEMORY)

    # ---- called by the step

    def blocked(self) -> Generator[float | None, Any, None]:
        """Wait while the training thread is blocked, if it is."""
        ns, self._blocked_ns = self._blocked_ns, 0.0
        if ns:
            yield ns

    def before_collective(self) -> Generator[float | None, Any, None]:
        """Wait in place of a skipped collective, until the generation is aborted."""
        while self._skipping == self._job.generation:
            yield LOOK_NS
            self._job.check()
        self._skipping = 0
