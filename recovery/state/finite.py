"""Whether the values of a step are finite, determined without waiting for the GPU that holds
them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Amount = float | Tensor
"""A number, or a tensor of one on a GPU, not awaited yet."""


def amount_of(loss: Tensor) -> Amount:
    """The value of a loss, as it is at hand: reading it from a GPU would wait for all that was
    given to it.
    """
    value = loss.detach()
    return float(value) if on_host(value) else value


def on_host(tensor: Tensor) -> bool:
    """Whether reading a tensor waits for nothing."""
    return tensor.device.type == "cpu"


def all_finite(flat: Tensor) -> bool:
    """Whether all values are finite. Waits for the device."""
    # A finite sum proves that all terms are finite; only an infinite or NaN sum needs the full
    # look.
    return bool(torch.isfinite(flat.sum())) or bool(torch.isfinite(flat).all())


def largest(flat: Tensor) -> Tensor:
    """The largest magnitude, finite where all values are; not awaited. 0 for no values."""
    if not flat.numel():
        return torch.zeros((), dtype=flat.dtype, device=flat.device)
    return torch.linalg.vector_norm(flat, float("inf"))


class NonFiniteCheck:
    """Checks values for non-finite ones; on a GPU the result stays there."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset: no value was checked yet."""
        self._found = False
        self._magnitudes: list[Tensor] = []

    def look(self, values: Amount) -> None:
        """Check a number, or all values of a tensor."""
        if not isinstance(values, Tensor):
            self._found = self._found or not math.isfinite(values)
        elif on_host(values):
            self._found = self._found or not all_finite(values)
        else:
            self._magnitudes.append(largest(values).to(torch.float64))

    def flag(self) -> Amount:
        """1 if any was not finite, else 0."""
        if self._found or not self._magnitudes:
            return float(self._found)
        return torch.isfinite(torch.stack(self._magnitudes)).all().logical_not().to(torch.float64)
