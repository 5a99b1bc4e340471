"""Values of one rank's tensors go wrong."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from chaos.events import Event, Kind
from chaos.fault import Fault, Landed, Occurrence, Where
from chaos.targets import RankTarget

_PHASES = {"gradient": "collective", "parameter": "forward", "loss": "forward"}


class TensorCorrupt(Fault):
    """Overwrites elements in one rank: a bad multiply, a flipped memory bit, an overflow. Real.

    ``surface``: gradient (after backward, before it is reduced), parameter (before forward), or loss.
    ``op``: nan, inf, or bitflip of bit ``bit`` (float32: 0-22 mantissa, 23-30 exponent, 31 sign).
    ``count``: elements hit, chosen with the seed. Landed: the rank's own digest of the tensor differs from
    the one taken just before.
    """

    where: ClassVar[Where] = Where.RANK
    phases: ClassVar[tuple[str, ...]] = ("data", "forward", "backward", "collective")

    surface: Literal["gradient", "parameter", "loss"] = "gradient"
    op: Literal["nan", "inf", "bitflip"] = "nan"
    bit: int = Field(default=30, ge=0, le=31)
    count: int = Field(default=1, ge=1, le=1_000_000)

    def point(self, phase: str) -> str:
        """Each surface exists at one point of a step only."""
        return _PHASES[self.surface]

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Change the values; returns where."""
        if self.surface == "loss":
            target.poison_loss(self._changed)
            return {"surface": self.surface, "op": self.op}
        rng = random.Random(f"{target.seed}/{target.step}")
        named = [
            (n, p)
            for n, p in target.model.named_parameters()
            if self.surface == "parameter" or p.grad is not None
        ]
        name, parameter = named[rng.randrange(len(named))]
        tensor = parameter.data if self.surface == "parameter" else parameter.grad
        size = tensor.numel()
        places = sorted({rng.randrange(size) for _ in range(self.count)})
        flat = tensor.view(-1)
        old = [float(flat[place]) for place in places]
        for place, value in zip(places, old, strict=True):
            flat[place] = self._value(value)
        new = [float(flat[place]) for place in places]
        return {
            "surface": self.surface, "op": self.op, "tensor": name, "elements": places[:10],
            "old": [str(v) for v in old[:10]], "new": [str(v) for v in new[:10]],
        }  # fmt: skip

    def _changed(self, loss: Any) -> Any:
        if self.op == "bitflip":
            value = float(loss.detach())
            return loss * (self._value(value) / value if value else 1.0)
        return loss * self._value(0.0)

    def _value(self, value: float) -> float:
        operations: dict[str, Callable[[], float]] = {
            "nan": lambda: float("nan"),
            "inf": lambda: float("inf"),
            "bitflip": lambda: flip(value, self.bit),
        }
        return operations[self.op]()

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Digests before and after, taken by the rank's own code."""
        for event in events:
            if event.kind is Kind.FAULT_EFFECT and event.data["fault"] == occurrence.fault:
                evidence = event.data["evidence"]
                same_one = event.data["occurrence"] == occurrence.number
                if same_one and "after" in evidence and evidence["before"] != evidence["after"]:
                    return Landed(witness="rank: tensor digests", evidence=evidence)
        return None


def flip(value: float, bit: int) -> float:
    """``value`` as IEEE 754 binary32 with one bit flipped."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    (flipped,) = struct.unpack("<f", struct.pack("<I", word ^ (1 << bit)))
    return float(flipped)
