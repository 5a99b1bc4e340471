"""A few numbers that a fault can overwrite like a model's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainchaos.harness.sim.rank.state import digest, uniform

ELEMENTS = 8
LARGEST = 3.4e38
"""Largest finite value in single precision."""
NAMES = ("embedding.weight", "block.weight", "head.weight")


class SimTensor:
    """A flat row of numbers with the tensor methods that faults need."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def numel(self) -> int:
        """Number of elements."""
        return len(self.values)

    def view(self, *_: int) -> SimTensor:
        """Itself, as it is flat."""
        return self

    def __getitem__(self, index: int) -> float:
        return self.values[index]

    def __setitem__(self, index: int, value: float) -> None:
        self.values[index] = value

    def mul_(self, factor: float) -> SimTensor:
        """Multiply all, in place."""
        self.values = [value * factor for value in self.values]
        return self


class SimParameter:
    """A parameter with its gradient."""

    def __init__(self, data: SimTensor, grad: SimTensor) -> None:
        self.data = data
        self.grad = grad


class SimModel:
    """Parameters, gradients and optimizer state, drawn from their hashes."""

    def __init__(self, parameters: bytes, gradient: bytes, optimizer: bytes = b"") -> None:
        self._named = {
            name: SimParameter(_tensor(name, parameters), _tensor(name, gradient)) for name in NAMES
        }
        self._optimizer = {f"optimizer.{name}.momentum": _tensor(name, optimizer) for name in NAMES}

    def named_parameters(self) -> Iterator[tuple[str, SimParameter]]:
        """As ``torch.nn.Module.named_parameters``."""
        return iter(self._named.items())

    def stored(self, surface: str) -> dict[str, SimTensor]:
        return {
            "parameter": {name: p.data for name, p in self._named.items()},
            "gradient": {name: p.grad for name, p in self._named.items()},
            "optimizer_state": self._optimizer,
        }[surface]

    def surfaces(self) -> dict[str, list[float]]:
        """All values that a fault may have changed."""
        return {
            "parameter": [v for p in self._named.values() for v in p.data.values],
            "gradient": [v for p in self._named.values() for v in p.grad.values],
            "optimizer_state": [v for t in self._optimizer.values() for v in t.values],
        }


class SimLoss:
    """A scalar loss."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value

    def __mul__(self, factor: float) -> SimLoss:
        return SimLoss(self.value * factor)

    def detach(self) -> SimLoss:
        """Itself, as there is no graph."""
        return self


def finite(values: list[float]) -> bool:
    """Whether all values are finite."""
    return all(map(math.isfinite, values))


def huge(values: list[float]) -> bool:
    """Whether their norm in single precision is infinite although they are finite."""
    return finite(values) and sum(value * value for value in values) > LARGEST


def norm_above(values: list[float]) -> float:
    """Euclidean norm of the values beyond [-1, 1], within which all are unless a fault changed
    them; 0 where it would not be finite.
    """
    norm = math.hypot(*(value for value in values if abs(value) > 1.0))
    return norm if math.isfinite(norm) else 0.0


def _tensor(name: str, source: bytes) -> SimTensor:
    return SimTensor([uniform(digest(name, source, index)) for index in range(ELEMENTS)])
