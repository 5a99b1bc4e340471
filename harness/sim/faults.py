"""The fault injector's hand inside a simulated rank: ``harness.rank_faults`` on simulated time and state."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from chaos import plugins
from chaos.events import Kind
from chaos.fault import Fault, Where
from chaos.schedule import NEXT_STEP
from chaos.targets import DiskTrouble
from harness.shims.disk import DiskShim
from harness.sim.body import SimBody
from harness.sim.clock import NS_PER_S
from harness.sim.group import Lost
from harness.sim.process import Killed
from harness.sim.signs import SimSigns
from harness.sim.tensors import SimLoss, SimModel, SimTensor
from recovery import order
from recovery.wire import Extra

if TYPE_CHECKING:
    from harness.sim.rank import SimRank

HOLD_LIMIT_NS = 10 * NS_PER_S
ABORT_LOOK_NS = NS_PER_S // 20
SLICE_NS = NS_PER_S // 50
Sleeping = Generator[float | None, Any, None]


class TrainingError(Exception):
    """A fault raised in training code."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.kind = type(error).__name__


class _Lasting:
    """A fault in force, and until when."""

    def __init__(self, fault: Fault, command: Mapping[str, Any], step: int, now_ns: int) -> None:
        self.fault = fault
        self.id: str = command["fault"]
        self.occurrence: int = command["occurrence"]
        seconds, steps = command["duration_s"], command["duration_steps"]
        self.until_ns = now_ns + seconds * NS_PER_S if seconds is not None else float("inf")
        self.until_step = step + steps if steps is not None else float("inf")


@dataclass(frozen=True, kw_only=True)
class _Next:
    """What a fault still has to do, at the same phase of a later step."""

    phase: str
    after_step: int
    command: dict[str, Any]
    action: Callable[[], None]


class SimFaultAgent:
    """Holds its rank at armed points, acts when told to, and implements ``chaos.targets.RankTarget``."""

    def __init__(self, job: SimRank) -> None:
        self._job = job
        self._armed: dict[tuple[int, str], list[dict[str, Any]]] = {}
        self._lasting: list[_Lasting] = []
        self._go: dict[str, Any] | None = None
        self._holding: int | None = None
        self._holds = ""  # for this fault
        self._slowdown = 1.0
        self.rationed = 1.0  # as many times as long for want of processor time
        self._rate = 0.0
        self._latency_s = 0.0
        self._free_at_ns = 0.0
        self.active = False
        self.rank = -1
        self.step = 0
        self.seed = 0
        self.disk = DiskShim(sleep=_at_once, die=_die, say=self._effect)
        self.body = SimBody(job)
        self.signs = SimSigns(job)
        self._data_delay_s = 0.0
        self._standing: list[dict[str, Any]] = []
        self._installed: set[tuple[str, int]] = set()
        self.poisoned: set[int] = set()
        self._next: list[_Next] = []
        self._acting: Fault | None = None
        self.model = SimModel(b"", b"")
        self.optimizer: Any = None

    # ---- called by the agent

    def on_command(self, topic: str, payload: dict[str, Any]) -> None:
        """``arm`` replaces what is armed; ``go`` answers ``at_point``."""
        if topic == "arm":
            armed: dict[tuple[int, str], list[dict[str, Any]]] = {}
            for point in payload["points"]:
                armed.setdefault((point["step"], point["phase"]), []).append(point)
            self._armed = armed
            self._standing = payload["standing"]
            self.active = bool(armed or self._standing or self._lasting or self._next or self.body.broken)
        elif topic == "go" and self._holding is not None and payload["fault"] == self._holds:
            self._go = payload
            self._job.process.wake(self._holding, True)
        elif topic == "go" and payload["act"]:
            about = {"fault": payload["fault"], "occurrence": payload["occurrence"]}
            self._job.send(Extra(topic="missed", payload=about))
        elif topic == "disk":
            self.disk.break_next_save(payload)
        elif topic == "pace":
            self._rate, self._latency_s = payload["bytes_per_s"] or 0.0, payload["latency_s"]
            self._free_at_ns = 0.0

    def aborted(self) -> None:
        """The generation was aborted: a rank that holds notices within a look."""
        if self._holding is not None:
            process = self._job.process
            delay = process.rng.uniform(0, ABORT_LOOK_NS)
            process.clock.after(
                delay, partial(process.fail, self._holding, Lost("aborted by the supervisor"))
            )

    # ---- called by the body

    def at(self, step: int, phase: str) -> Sleeping:
        """Hold at each fault armed for this point until the supervisor answers."""
        standing, self._standing = self._standing, []
        for command in standing:
            if (command["fault"], command["occurrence"]) not in self._installed:
                self.rank, self.seed, self._go = self._job.rank, command["seed"], command
                self._act(command, command["step"])
        for point in (*self._armed.pop((step, phase), ()), *self._armed.pop((NEXT_STEP, phase), ())):
            self.step, self.rank, self.seed = step, self._job.rank, point["seed"]
            self._go, self._holds = None, point["fault"]
            where = {"fault": point["fault"], "step": step, "phase": phase}
            self._job.send(Extra(topic="at_point", payload=where))
            process = self._job.process
            self._holding = process.ticket
            process.clock.after(HOLD_LIMIT_NS, partial(process.wake, process.ticket, False))
            process.clock.after(ABORT_LOOK_NS, partial(self._still_held, process.ticket))
            try:
                answered = yield None
            finally:
                self._holding = None
            if not answered:
                self._job.send(Extra(topic="unanswered", payload=where))
            elif self._go is not None and self._go["act"]:
                self._act(self._go, step)
                yield from self.body.blocked()
        if phase == "data" and self._data_delay_s:
            yield from self._stall(self._data_delay_s * NS_PER_S)
        for item in [item for item in self._next if item.phase == phase and item.after_step < step]:
            self._next.remove(item)
            self.step, self.rank, self._go = step, self._job.rank, item.command
            self._effect(item.command, self._measured(item.action))

    def _still_held(self, ticket: int) -> None:
        """Whoever is held for a fault is not hung."""
        process = self._job.process
        if self._holding == ticket and process.running:
            if not process.stopped and not process.frozen:
                self._job.mark.touch()
            process.clock.after(ABORT_LOOK_NS, partial(self._still_held, ticket))

    def stretched(self, phase: str, spent_ns: float) -> Sleeping:
        """Stretch compute phases while slowed down."""
        factor = self._slowdown * self.rationed
        if factor > 1 and phase in ("forward", "backward"):
            yield from self._sleep((factor - 1) * spent_ns)

    def paced(self, size: int) -> Sleeping:
        """Wait until ``size`` more bytes may pass over the link."""
        if self._rate:
            now = self._job.process.clock.now_ns
            self._free_at_ns = max(now, self._free_at_ns) + size / self._rate * NS_PER_S
            yield from self._sleep(self._free_at_ns - now + self._latency_s * NS_PER_S)

    def committed(self, step: int) -> None:
        """End faults whose time is over."""
        for lasting in list(self._lasting):
            if step >= lasting.until_step or self._job.process.clock.now_ns >= lasting.until_ns:
                lasting.fault.heal(self)
                self._lasting.remove(lasting)
                self.active = bool(self._armed or self._lasting or self._next or self.body.broken)
                self._job.send(
                    Extra(topic="healed", payload={"fault": lasting.id, "occurrence": lasting.occurrence})
                )

    # ---- RankTarget

    def set_slowdown(self, factor: float, mode: str = "duty-cycle") -> str:
        """See chaos.targets.RankTarget."""
        self._slowdown = factor
        return f"simulated {mode}"

    def set_disk(self, trouble: DiskTrouble | None) -> None:
        """See chaos.targets.RankTarget."""
        self.disk.set_trouble(trouble, self.seed)

    def tensors(self, surface: str) -> Mapping[str, Any]:
        """See chaos.targets.RankTarget."""
        return self.model.stored(surface)

    def change_forward(self, surface: str, change: Callable[[Any], None]) -> None:
        """See chaos.targets.RankTarget."""
        command = self._go or {}

        def changed(values: list[float]) -> list[float]:
            tensor = SimTensor(list(values))
            change(tensor)
            self._effect(command, {"before": _digest(values), "after": _digest(tensor.values)})
            return tensor.values

        assert self._job.attempt is not None
        self._job.attempt.change_forward.append((surface, changed))

    def change_rng(self, change: Callable[[int], int]) -> None:
        """See chaos.targets.RankTarget."""
        assert self._job.attempt is not None
        before = self._job.attempt.seed
        after = self._job.attempt.seed = change(before)
        self._effect(self._go or {}, {"before": f"{before:x}", "after": f"{after:x}"})

    def shift_samples(self, by: int) -> None:
        """See chaos.targets.RankTarget."""
        attempt = self._job.attempt
        assert attempt is not None
        before = attempt.samples
        attempt.samples = [(sample + by) % self._job.config.samples for sample in before]
        evidence = {"before": _digest_ids(before), "after": _digest_ids(attempt.samples)}
        self._effect(self._go or {}, evidence)

    def due_samples(self) -> list[int]:
        """See chaos.targets.RankTarget."""
        config = self._job.config
        return order.batch(self.step, config.global_batch, config.samples, config.seed)

    def poison_sample(self, sample: int | None) -> None:
        """See chaos.targets.RankTarget."""
        self.poisoned = set() if sample is None else self.poisoned | {sample}

    def set_data_delay(self, seconds: float) -> None:
        """See chaos.targets.RankTarget."""
        self._data_delay_s = seconds

    def next_step(self, action: Callable[[], None]) -> None:
        """See chaos.targets.RankTarget."""
        assert self._acting is not None and self._go is not None
        phase = self._acting.point("forward")
        self._next.append(_Next(phase=phase, after_step=self.step, command=self._go, action=action))
        self.active = True

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        """See chaos.targets.RankTarget."""
        command = self._go or {}

        def changed(loss: SimLoss) -> SimLoss:
            result: SimLoss = change(loss)
            before, after = _digest([float(loss)]), _digest([float(result)])
            self._effect(command, {"before": before, "after": after, "value": str(float(result))})
            return result

        assert self._job.attempt is not None
        self._job.attempt.change_loss = changed

    # ---- acting

    def _act(self, command: dict[str, Any], step: int) -> None:
        fault = plugins.load("chaos.faults", Fault)[command["kind"]](**command["params"])
        if fault.where is not Where.RANK:
            return
        self._acting = fault
        self.step = step
        if fault.everywhere:
            self._installed.add((command["fault"], command["occurrence"]))
        done: dict[str, Any] = {}
        try:
            measured = self._measured(lambda: done.update(fault.act(self)))
        except Exception as error:
            raise TrainingError(error) from error
        done |= measured
        self._effect(command, done)
        if fault.lasting:
            self._lasting.append(_Lasting(fault, command, step, self._job.process.clock.now_ns))
            self.active = True

    def _measured(self, action: Callable[[], None]) -> dict[str, Any]:
        """Do it, and have what it changed of the stored tensors follow into the state; digests, if anything."""
        attempt = self._job.attempt
        assert attempt is not None
        state = self._job.state
        self.model = SimModel(state.parameters, attempt.part.gradient, state.optimizer)
        before = self.model.surfaces()
        action()
        after = self.model.surfaces()
        # By digest, as a NaN is not even equal to itself.
        changed = sorted(name for name in before if _digest(before[name]) != _digest(after[name]))
        for name in changed:
            attempt.corrupted(name, after[name])
        if not changed:
            return {}
        name = changed[0]
        return {"before": _digest(before[name]), "after": _digest(after[name]), "changed": changed}

    def _stall(self, ns: float) -> Sleeping:
        """Sleep without a sign of life; an abort ends it."""
        until = self._job.process.clock.now_ns + int(ns)
        while (left := until - self._job.process.clock.now_ns) > 0:
            yield min(left, SLICE_NS)
            self._job.check()

    def _effect(self, command: Mapping[str, Any], evidence: Mapping[str, Any]) -> None:
        names = {"fault": command["fault"], "occurrence": command["occurrence"]}
        self._job.write(Kind.FAULT_EFFECT, step=self.step, evidence=dict(evidence), **names)

    def _sleep(self, ns: float) -> Sleeping:
        """Sleep in slices, showing progress and noticing an abort."""
        until = self._job.process.clock.now_ns + int(ns)
        while (left := until - self._job.process.clock.now_ns) > 0:
            yield min(left, SLICE_NS)
            self._job.mark.touch()
            self._job.check()


def _at_once(seconds: float) -> None:
    """A save is one moment here; what it takes longer was waited for before."""


def _die() -> None:
    raise Killed(signal.SIGKILL)


def _digest_ids(samples: list[int]) -> str:
    return _digest([float(sample) for sample in samples])


def _digest(values: list[float]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
