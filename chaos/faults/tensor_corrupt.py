"""Corrupts values of one rank's tensors."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Occurrence, ReportedByTarget
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import digests_differ, said_by_script

_PHASES = {"gradient": "collective", "optimizer_state": "optimizer"}  # the others: forward
_STORED = ("parameter", "gradient", "optimizer_state")
_TRIES = 64


class TensorCorrupt(Fault):
    """Tensor elements of one rank are overwritten: a bad multiply, a flipped memory bit, an
    overflow. Real.

    ``surface``: parameter (before forward), input (the first floating-point tensor that enters the
    model or a part of it), activation (the output of one module, chosen with the seed), loss,
    gradient (after backward, before the all-reduce), optimizer_state (before the optimizer uses
    it), or rng (the seed of the step's random numbers). ``op``: nan, inf, bitflip of bit ``bit``
    (float32: 0-22 mantissa, 23-30 exponent, 31 sign), scale by ``factor``, zero, or stale (the
    value of this step returns in the next step). ``count``: elements hit, chosen with the seed.
    Landed: the rank's own digest of the tensor differs from the one taken just before. A script
    that calls ``beacon.point`` fills all of its gradients with NaN: there, the script reports
    that it did, with a value computed from the gradients if it gave one.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    by_script: ClassVar[str] = "nan"
    corrupts: ClassVar[bool] = True
    changes_state: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("data", "forward", "backward", "collective", "optimizer")

    surface: Literal[
        "parameter", "gradient", "activation", "input", "loss", "optimizer_state", "rng"
    ] = "gradient"
    op: Literal["nan", "inf", "bitflip", "scale", "stale", "zero"] = "nan"
    bit: int = Field(default=30, ge=0, le=31)
    factor: float = Field(default=10.0, allow_inf_nan=False)
    count: int = Field(default=1, ge=1, le=1_000_000)

    @model_validator(mode="after")
    def _makes_sense(self) -> TensorCorrupt:
        if self.surface == "rng" and self.op in ("nan", "inf", "scale"):
            raise ValueError(
                f"the seed of random numbers is an integer, so that it cannot take op {self.op}: "
                "surface rng needs op bitflip, stale or zero"
            )
        for name, op in (("bit", "bitflip"), ("factor", "scale")):
            if self.op != op and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for op {op}, not for {self.op}")
        if self.op == "scale" and self.factor == 1:
            raise ValueError("factor 1 changes nothing")
        if self.count > 1 and self.surface in ("loss", "rng"):
            raise ValueError(f"count: surface {self.surface} has one element")
        return self

    def not_by_script(self) -> str | None:
        """A script can only fill its gradients with NaN."""
        if self.surface == "gradient" and self.op == "nan" and self.count == 1:
            return None
        return "only surface: gradient with op: nan, without a count (it fills all of them)"

    def point(self, phase: str) -> str:
        """Each surface exists at only one point of a step."""
        return _PHASES.get(self.surface, "forward")

    def changes(self) -> str:
        """The surface, as ``RankTarget.tensors`` names it."""
        return self.surface

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Change stored values, or install the change of values that are still to be computed;
        returns what is known of it.
        """
        done = {"surface": self.surface, "op": self.op}
        if self.surface in _STORED:
            return done | self._overwrite(target)
        if self.surface == "rng":
            self._reseed(target)
        elif self.surface == "loss":
            self._spoil_loss(target)
        else:
            self._spoil_forward(target)
        return done

    # ---- tensors stored between two phases

    def _overwrite(self, target: RankTarget) -> dict[str, Any]:
        rng = random.Random(f"{target.seed}/{target.step}")
        tensors = sorted((n, t) for n, t in target.tensors(self.surface).items() if t.numel() > 1)
        if not tensors:
            raise LookupError(f"no tensor to corrupt on surface {self.surface}")
        name, tensor = tensors[rng.randrange(len(tensors))]
        flat = tensor.view(-1)
        places = self._places(flat, rng)
        old = [float(flat[place]) for place in places]
        what = {"tensor": name, "elements": places[:10], "old": [str(v) for v in old[:10]]}
        if self.op == "stale":
            target.next_step(
                lambda: self._put(target.tensors(self.surface)[name].view(-1), places, old)
            )
            return what
        new = [self._value(value) for value in old]
        self._put(flat, places, new)
        return what | {"new": [str(v) for v in new[:10]]}

    def _places(self, flat: Any, rng: random.Random) -> list[int]:
        """Elements to hit; nonzero ones are preferred where the operation would leave a zero
        unchanged.
        """
        idle = self.op in ("scale", "zero")
        places: set[int] = set()
        for _ in range(self.count):
            tries = [rng.randrange(flat.numel()) for _ in range(_TRIES if idle else 1)]
            places.add(next((p for p in tries if float(flat[p])), tries[0]) if idle else tries[0])
        return sorted(places)

    @staticmethod
    def _put(flat: Any, places: Sequence[int], values: Sequence[float]) -> None:
        for place, value in zip(places, values, strict=True):
            flat[place] = value

    # ---- values that exist for a moment

    def _spoil_forward(self, target: RankTarget) -> None:
        rng = random.Random(f"{target.seed}/{target.step}")
        kept: list[float] = []

        def change(flat: Any) -> None:
            places = self._places(flat, random.Random(rng.random()))
            self._put(flat, places, [self._value(_plain(flat[place])) for place in places])

        def keep(flat: Any) -> None:
            kept.extend(_plain(flat[place]) for place in range(min(self.count, flat.numel())))

        def put_back(flat: Any) -> None:
            places = range(min(len(kept), flat.numel()))
            self._put(flat, places, kept[: len(places)])

        if self.op == "stale":
            target.change_forward(self.surface, keep)
            target.next_step(lambda: target.change_forward(self.surface, put_back))
        else:
            target.change_forward(self.surface, change)

    def _spoil_loss(self, target: RankTarget) -> None:
        if self.op != "stale":
            target.poison_loss(self._changed)
            return
        kept: list[float] = []

        def keep(loss: Any) -> Any:
            kept.append(float(loss.detach()))
            return loss

        def put_back(loss: Any) -> Any:
            value = float(loss.detach())
            return loss * (kept[0] / value if kept and value else 1.0)

        target.poison_loss(keep)
        target.next_step(lambda: target.poison_loss(put_back))

    def _changed(self, loss: Any) -> Any:
        if self.op in ("bitflip", "scale"):
            value = float(loss.detach())
            return loss * (self._value(value) / value if value else 1.0)
        # The graph stays as it is, so that the gradients are wrong in the same way.
        return loss * self._value(0.0)

    def _reseed(self, target: RankTarget) -> None:
        if self.op == "bitflip":
            target.change_rng(lambda seed: seed ^ (1 << self.bit))
        elif self.op == "zero":
            target.change_rng(lambda seed: 0)
        else:
            kept: list[int] = []
            target.change_rng(lambda seed: kept.append(seed) or seed)  # type: ignore[func-returns-value]
            target.next_step(lambda: target.change_rng(lambda seed: kept[0]))

    def _value(self, value: float) -> float:
        operations: dict[str, Callable[[], float]] = {
            "nan": lambda: float("nan"),
            "inf": lambda: float("inf"),
            "bitflip": lambda: flip(value, self.bit),
            "scale": lambda: value * self.factor,
            "zero": lambda: 0.0,
        }
        return operations[self.op]()

    def follows(self) -> tuple[Consequence, ...]:
        """The rank itself reports the change."""
        return (ReportedByTarget(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """Digests before and after, taken by the rank's own code; or the script's report."""
        if said := said_by_script(occurrence, events, self.by_script):
            spoilt = said.get("after", "nan") in ("nan", "inf", "-inf")
            return Landed(witness="script: its own word", evidence=said) if spoilt else None
        return digests_differ(occurrence, events, "rank: tensor digests")


def flip(value: float, bit: int) -> float:
    """``value`` as IEEE 754 binary32 with one bit flipped."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    (flipped,) = struct.unpack("<f", struct.pack("<I", word ^ (1 << bit)))
    return float(flipped)


def _plain(value: Any) -> float:
    """A value of a tensor, or of a simulated one, as a number."""
    return value.item() if hasattr(value, "item") else float(value)
