"""A device keeps its rate under load: the same product over and over, in slices of time.

Of a processor, the time is what the process got of it: clocks that fall show in it, and other
processes that take turns on the core do not.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trainchaos.harness.preflight.checks.bounds import ROUNDS
from trainchaos.harness.preflight.checks.check import (
    Measured,
    PlaceCheck,
    Task,
    is_cuda,
    torch_name,
)
from trainchaos.harness.preflight.checks.findings import Finding, Rate
from trainchaos.harness.preflight.checks.product import CPU_SIZE, CUDA_SIZE, factors, multiply
from trainchaos.recovery.health.estimates import median

SLICE_S = 0.04
LEAST_SLICES, MOST_SLICES = 3, 5000
_SLOWED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Clocks event reasons of NVML that mean a fault of cooling or supply (nvml.h,
nvmlClocksEventReason*); a power cap (0x4) under load is normal.
"""


@dataclass(frozen=True, kw_only=True)
class ClocksCheck(PlaceCheck):
    """``clock``: seconds of which the rate is, None: of the processor or, of a GPU, of the wall;
    ``wall``: seconds that count for the budget; ``work``: makes of a task a function that does one
    product and returns when it is done, and its floating-point operations; ``says``: what NVML says
    of a device.
    """

    name: ClassVar = "clocks"
    seconds: ClassVar = (0.4, 2.0)
    rounds: ClassVar = ROUNDS
    clock: Callable[[], float] | None = None
    wall: Callable[[], float] = time.monotonic
    work: Callable[[Task], tuple[Callable[[], None], float]] | None = None
    says: Callable[[str], Mapping[str, float]] | None = None

    def measure(self, task: Task) -> Measured:
        """One round: rates of slices, in GFLOP/s, and NVML's clocks at its end."""
        run, operations = (self.work or products)(task)
        run()  # the first one allocates
        clock = self.clock or (time.monotonic if is_cuda(task.place) else time.thread_time)
        rates: list[float] = []
        began_s, last_s = self.wall(), clock()
        done = 0
        while len(rates) < MOST_SLICES:
            run()
            done += 1
            now_s = clock()
            if now_s - last_s >= SLICE_S:
                rates.append(done * operations / (now_s - last_s) / 1e9)
                done, last_s = 0, now_s
                if self.wall() - began_s >= task.budget_s and len(rates) >= LEAST_SLICES:
                    break
        said = dict((self.says or nvml)(task.place)) if is_cuda(task.place) else {}
        return {"rates": rates, "nvml": said, "seconds": self.wall() - began_s}

    def judge(self, place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
        """What it is. Compared are the rate of each round, and the part of it that its last third
        kept.
        """
        by_round = [list(one["rates"]) for one in rounds]
        rates = [rate for one in by_round for rate in one]
        said = f"{median(rates):.1f} GFLOP/s, the last third {100 * kept(rates):.0f} % of the first"
        shown = [one["nvml"] for one in rounds if one["nvml"]]
        if shown:
            last = shown[-1]
            said += f"; SM {last.get('clock_sm', 0):.0f} MHz, {last.get('temperature', 0):.0f} degC"
            reasons = 0
            for one in shown:
                reasons |= int(one.get("throttle_reasons", 0))
            said += "".join(f", {text}" for bit, text in _SLOWED.items() if reasons & bit)
        finding = Finding(
            said=said,
            measured=median(rates),
            unit="GFLOP/s",
            evidence={"slices": len(rates), "nvml": shown},
        )
        cooler = (
            "look at cooling and power: nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE"
            if is_cuda(place)
            else "look for other load (top), a limit of processor time, and heat"
        )
        compared = (
            ("rate", "GFLOP/s", [median(one) for one in by_round]),
            ("kept", "of the first third", [kept(one) for one in by_round]),
        )
        return finding, [
            Rate(metric=metric, unit=unit, peers=True, rounds=values, todo=cooler)
            for metric, unit, values in compared
        ]


def kept(rates: Sequence[float]) -> float:
    """Median of the last third of the slices over that of the first; 1 of fewer than three."""
    third = len(rates) // 3
    if not third:
        return 1.0
    first, last = median(rates[:third]), median(rates[-third:])
    return last / first if first > 0.0 else 0.0


def products(task: Task) -> tuple[Callable[[], None], float]:
    """One product of float32 matrices, and its 2 n^3 operations."""
    import torch

    device = torch_name(task.place)
    n = CUDA_SIZE if is_cuda(task.place) else CPU_SIZE
    a, b = factors(n, device, task.seed)

    def run() -> None:
        multiply(a, b)
        if is_cuda(task.place):
            torch.cuda.synchronize(device)

    return run, 2.0 * n**3


def nvml(place: str) -> Mapping[str, float]:
    """Clock (MHz), temperature (degC) and throttle reasons of a CUDA device, found by its UUID, as
    torch counts visible devices only; empty where NVML does not say.
    """
    import torch

    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}
    found: dict[str, float] = {}
    try:
        library.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(place).uuid)
        named = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        handle = library.nvmlDeviceGetHandleByUUID(named)
        asks: dict[str, Callable[[], Any]] = {
            "clock_sm": lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
            "temperature": lambda: library.nvmlDeviceGetTemperature(
                handle, library.NVML_TEMPERATURE_GPU
            ),
            "throttle_reasons": lambda: library.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
        for name, ask in asks.items():
            found[name] = float(ask())
    except (library.NVMLError, AttributeError, OSError):
        return found
    return found
