"""A device multiplies matrices rightly, and each time the same.

The first product is checked against a second computation in float64 on the host; later ones must be
equal to it in every bit, so that a device that is wrong now and then is seen. The bound is that of
a product in any order of summation, with or without fused operations: |C - AB| <= g |A||B|
componentwise, g = n u / (1 - n u), u = 2^-24 (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., eq. 3.13). Of a large product, some rows are computed again, and all rows are
summed (Huang and Abraham 1984): a sum over a row of C has the bound summed over the row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trainchaos.harness.preflight.checks.check import (
    Measured,
    PlaceCheck,
    Task,
    is_cuda,
    torch_name,
)
from trainchaos.harness.preflight.checks.findings import Finding, Rate

CPU_SIZE, CUDA_SIZE = 256, 4096
"""Rows of the matrices. On the CPU a product takes some milliseconds, and on a GPU its tiles (128 x
128 in cuBLAS) outnumber the multiprocessors (132 on an H100) several times, so that all compute.
"""
ROWS = 256
"""Computed again in float64; others only by their sum."""
LEAST_REPEATS, MOST_REPEATS = 8, 2000
UNIT = 2.0**-24
"""Unit roundoff of float32."""

Multiply = Callable[[Any, Any], Any]
"""Of two float32 tensors (n, n) on a device: their product there."""


def gamma(n: int, unit: float = UNIT) -> float:
    """Higham's bound of the relative error of a sum of n products; n * unit < 1."""
    return n * unit / (1.0 - n * unit)


def factors(n: int, device: str, seed: int) -> tuple[Any, Any]:
    """Two float32 matrices (n, n), uniform in [-1, 1), made on the host: the same everywhere."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(n, n, generator=generator) * 2.0 - 1.0 for _ in range(2))
    return a.to(device), b.to(device)


def multiply(a: Any, b: Any) -> Any:
    """torch's product in full float32, whatever the environment prefers."""
    import torch

    torch.set_float32_matmul_precision("highest")
    return a @ b


@dataclass(frozen=True, kw_only=True)
class ProductCheck(PlaceCheck):
    """``multiply``: the device's product; ``size``: rows of the matrices, 0: by the device;
    ``most``: how many products at the most.
    """

    name: ClassVar = "product"
    seconds: ClassVar = (0.7, 5.0)
    multiply: Multiply = multiply
    size: int = 0
    most: int = MOST_REPEATS

    def measure(self, task: Task) -> Measured:
        """Products until the time is over, LEAST_REPEATS at least."""
        import torch

        began_s = time.monotonic()
        device = torch_name(task.place)
        n = self.size or (CUDA_SIZE if is_cuda(task.place) else CPU_SIZE)
        a, b = factors(n, device, task.seed)
        first = self.multiply(a, b).clone()
        worst = excess(a, b, first)
        repeats, different, wrong, largest = 1, 0, int(worst > 1.0), worst
        while repeats < self.most and (
            repeats < LEAST_REPEATS or time.monotonic() - began_s < task.budget_s
        ):
            again = self.multiply(a, b)
            repeats += 1
            if not torch.equal(again, first):
                different += 1
                worst = excess(a, b, again)
                wrong += worst > 1.0
                largest = max(largest, worst)
        return {
            "rows": n,
            "repeats": repeats,
            "different": different,
            "wrong": int(wrong),
            "largest_error_over_bound": min(largest, 1e300),
            "seed": task.seed,
            "seconds": time.monotonic() - began_s,
        }

    def judge(self, place: str, rounds: Sequence[Measured]) -> tuple[Finding, Sequence[Rate]]:
        """One product beyond the bound, or one that differs in a bit, is unfit. The clocks' check
        measures the rate.
        """
        (measured,) = rounds
        n, wrong, different = measured["rows"], measured["wrong"], measured["different"]
        largest = float(measured["largest_error_over_bound"])
        what = f"{measured['repeats']} products of {n} x {n}"
        finding = Finding(
            said=f"{what}, all alike; error {largest:.2g} of the bound",
            measured=largest,
            bound=1.0,
            unit="of the bound",
            evidence=measured,
        )
        if not wrong and not different:
            return finding, ()
        said = f"{what}: {wrong} beyond the error bound ({largest:.3g} times it), {different}"
        said += " differ from the first in a bit"
        todo = (
            "take the device out; dcgmi diag -r 3 tests it for hours, and a device that is wrong"
            " now and then is replaced"
            if is_cuda(place)
            else "take the machine out: its processor or memory computes wrongly"
        )
        return replace(finding, state="unfit", said=said, todo=todo), ()


def excess(a: Any, b: Any, product: Any) -> float:
    """Largest error of a product, as a part of its bound; inf where it is no number."""
    import torch

    n = int(a.shape[0])
    a64, b64, c64 = (one.to("cpu", torch.float64) for one in (a, b, product))
    if not bool(torch.isfinite(c64).all()):
        return float("inf")
    step = -(-n // ROWS)
    some = slice(0, n, step)
    # The reference has an error of its own, by the unit roundoff of float64.
    g = gamma(n) + gamma(n, 2.0**-53)
    size = g * (a64[some].abs() @ b64.abs())
    worst = float(((c64[some] - a64[some] @ b64).abs() / size).max())
    if step > 1:
        sums = (c64.sum(1) - a64 @ b64.sum(1)).abs()
        bound = g * (a64.abs() @ b64.abs().sum(1))
        worst = max(worst, float((sums / bound).max()))
    return worst
