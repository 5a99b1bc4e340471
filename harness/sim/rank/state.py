"""The state that a simulated rank trains: a rolling hash in place of tensors, so that every
difference shows.

``parameters' = H(parameters, reduced gradient, learning rate)``; a rank's part of the gradient is a
hash of its parameters, samples and random numbers. The loss is a smooth curve plus noise of the
samples, summed in rank order, so that another partition of the same batch changes only the
rounding, as in real training.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

BASE_LR = 1e-3
WARM_UP_STEPS = 10
STATE_BYTES = 256
_SCALE = float(1 << 64)


def digest(*parts: object) -> bytes:
    """A hash of 16 bytes."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def uniform(raw: bytes) -> float:
    """A number in [-0.5, 0.5) from a hash."""
    return int.from_bytes(raw[:8], "big") / _SCALE - 0.5


@lru_cache(maxsize=65536)
def sample_noise(sample: int) -> float:
    """How much harder than average a sample is."""
    return 0.4 * uniform(digest("sample", sample))


def learning_rate(scheduler_step: int, steps: int) -> float:
    """Warm-up, then cosine decay to a tenth."""
    warm = min(1.0, (scheduler_step + 1) / WARM_UP_STEPS)
    return BASE_LR * warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, scheduler_step / steps)))


class Own(NamedTuple):
    """What a rank has of its own: buffers, which each forward pass changes, and something that the
    script has registered, which counts samples.
    """

    buffers: bytes = b"\0" * 16
    seen: int = 0

    def passed(self, samples: Sequence[int]) -> Own:
        """After a forward pass."""
        return Own(digest(self.buffers, list(samples)), self.seen + len(samples))


NOTHING = Own()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceInput:
    """One rank's input to the all-reduce, for its last micro-batch; ``before``: loss and gradient
    of the earlier ones. ``bad``: not finite; ``huge``: finite, but too large to be squared.
    ``own``: after its passes, as a checkpoint has it.
    """

    loss_sum: float
    count: int
    pause: bool
    gradient: bytes
    bad: bool
    save: bool = False
    save_memory: bool = False
    before: tuple[tuple[float, bytes], ...] = ()
    huge: bool = False
    norm: float = 0.0
    own: Own = NOTHING


def after_each_other(parts: Sequence[ReduceInput]) -> ReduceInput:
    """Combine several micro-batches of one rank."""
    before = tuple((part.loss_sum, part.gradient) for part in parts[:-1])
    count, bad = sum(part.count for part in parts), any(part.bad for part in parts)
    huge = any(part.huge for part in parts)
    norm = max(part.norm for part in parts)
    return replace(parts[-1], count=count, bad=bad, before=before, huge=huge, norm=norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """The result of the all-reduce, as ``recovery.collectives.reduce.Reduced``."""

    loss: float
    samples: int
    pause: bool
    blamed: tuple[int, ...]
    gradient: bytes
    save: bool = False
    save_memory: bool = False
    huge: bool = False
    norm: float = 0.0
    owns: tuple[Own, ...] = ()

    @property
    def grad_norm(self) -> float:
        """About 1 and what a fault added, or NaN, or infinite, which does not require a non-finite
        value on any rank.
        """
        usual = float("inf") if self.huge else 1.0 + 0.2 * uniform(self.gradient) + self.norm
        return float("nan") if self.blamed else usual

    @property
    def finite(self) -> bool:
        """As in the real one."""
        return not self.blamed and math.isfinite(self.grad_norm)


def combine(parts: dict[int, ReduceInput]) -> Reduced:
    """Sum over the ranks in their order, or over the micro-batches in theirs, which gives
    the same.
    """
    each = [
        one for part in parts.values() for one in (*part.before, (part.loss_sum, part.gradient))
    ]
    samples = sum(part.count for part in parts.values())
    return Reduced(
        loss=sum(loss for loss, _ in each) / max(1, samples),
        samples=samples,
        pause=any(part.pause for part in parts.values()),
        save=any(part.save for part in parts.values()),
        save_memory=any(part.save_memory for part in parts.values()),
        blamed=tuple(rank for rank, part in parts.items() if part.bad),
        gradient=digest([gradient for _, gradient in each]),
        huge=any(part.huge for part in parts.values()),
        norm=max((part.norm for part in parts.values()), default=0.0),
        owns=tuple(parts[rank].own for rank in sorted(parts)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The full training state after ``step``.

    ``progress``: how far down the loss curve; ``bad``: the parameters hold non-finite values;
    ``due``: values of optimizer state that a fault changed, which reach the parameters with the
    next step that is applied; ``owns``: what each rank had of its own after the last step, which a
    checkpoint keeps.
    """

    seed: int
    step: int = 0
    parameters: bytes = b"\0" * 16
    optimizer: bytes = b"\0" * 16
    progress: float = 0.0
    optimizer_step: int = 0
    scheduler_step: int = 0
    bad: bool = False
    due: tuple[tuple[float, ...], ...] = ()
    own: Own = NOTHING
    owns: tuple[Own, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether all of it may be saved."""
        return not self.bad and all(math.isfinite(value) for values in self.due for value in values)

    @classmethod
    def initial(cls, seed: int) -> State:
        """The state built from the seed, the same on every rank."""
        return cls(
            seed=seed, parameters=digest("parameters", seed), optimizer=digest("optimizer", seed)
        )

    def of_shard(self, shard: int) -> State:
        """One shard of the initial state."""
        return replace(
            self, parameters=digest(self.parameters, shard), optimizer=digest(self.optimizer, shard)
        )

    def torn(self) -> State:
        """Half overwritten: a receiver's state until it has received everything."""
        return replace(
            self,
            parameters=digest("torn", self.parameters),
            optimizer=digest("torn", self.optimizer),
        )

    def part(
        self, samples: list[int], random_word: bytes, *, pause: bool, others: Sequence[State] = ()
    ) -> ReduceInput:
        """This rank's share of the batch, forward and backward. ``others``: all shards, in order,
        if there are several.
        """
        parameters: object = [state.parameters for state in others] if others else self.parameters
        bad = any(state.bad for state in (self, *others))
        gradient = digest(parameters, samples, random_word)
        level = 1.5 + 3.0 * math.exp(-self.progress / 15.0)
        loss = sum(level + sample_noise(sample) for sample in samples) + 1e-9 * uniform(gradient)
        if bad:
            loss = float("nan")
        return ReduceInput(
            loss_sum=loss, count=len(samples), pause=pause, gradient=gradient, bad=bad
        )

    def applied(self, reduced: Reduced, lr: float) -> State:
        """The state one step later."""
        parameters = digest(self.parameters, reduced.gradient, lr)
        for values in self.due:
            parameters = digest(parameters, list(values))
        return replace(
            self,
            step=self.step + 1,
            parameters=parameters,
            optimizer=digest(self.optimizer, reduced.gradient),
            progress=self.progress + lr / BASE_LR,
            optimizer_step=self.optimizer_step + 1,
            scheduler_step=self.scheduler_step + 1,
            bad=not self.finite or not reduced.finite,
            due=(),
            owns=reduced.owns,
        )

    def digests(self) -> dict[str, str]:
        """Digest of each part, as in ``TrainState.digests``."""
        return {
            "parameters": digest(self.parameters, self.bad).hex()[:16],
            "optimizer": digest(self.optimizer).hex()[:16],
            "scheduler": digest("scheduler", self.scheduler_step).hex()[:16],
            "rng": digest("rng", self.seed, self.step).hex()[:16],
            "buffers": self.own.buffers.hex()[:16],
            "registered.seen": digest("seen", self.own.seen).hex()[:16],
        }

    def voted(self) -> str:
        """The parts that are alike on all that hold the same, as in
        ``recovery.state.fingerprint``.
        """
        digests = self.digests()
        return " ".join(
            f"{part}:{digests[part]}" for part in ("parameters", "optimizer", "scheduler")
        )

    def data(self) -> bytes:
        """Content of a checkpoint's data file: the hashes, then as many zero bytes to fill
        it up.
        """
        return (self.parameters + self.optimizer).ljust(STATE_BYTES, b"\0")

    def scalars(self) -> dict[str, Any]:
        """Content of its manifest."""
        return {
            "step": self.step,
            "seed": self.seed,
            "progress": self.progress,
            "bad": self.bad,
            "due": self.due,
            "optimizer_step": self.optimizer_step,
            "scheduler_step": self.scheduler_step,
            "owns": [(own.buffers.hex(), own.seen) for own in self.owns],
        }

    @classmethod
    def restored(cls, data: bytes, scalars: dict[str, Any], shard: int = 0) -> State:
        """Rebuild a state from its ``data`` and ``scalars``; if ``data`` has several shards in
        sequence, take only ``shard``.
        """
        mine = data[shard * STATE_BYTES :]
        return cls(
            parameters=mine[:16].ljust(16, b"\0"),
            optimizer=mine[16:32].ljust(16, b"\0"),
            **{
                **scalars,
                "due": tuple(map(tuple, scalars["due"])),
                "owns": tuple(Own(bytes.fromhex(raw), seen) for raw, seen in scalars["owns"]),
            },
        )
