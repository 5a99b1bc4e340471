"""The fault injector's hand inside a rank: holds it at the planned point, acts when told to, and measures the
effect.

The supervisor decides; this only reports ``at_point`` and waits for ``go``, so that the undo record and the
``fault_injected`` event are on disk before anything happens, for faults from outside and from inside alike.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from chaos import plugins
from chaos.events import Kind
from chaos.fault import Fault, Where
from chaos.schedule import NEXT_STEP
from chaos.targets import DiskTrouble
from harness.shims.body import BodyShim
from harness.shims.disk import DiskShim
from harness.shims.signs import SignsShim
from harness.shims.slowness import Slowness
from harness.shims.tensors import TensorShim, digest
from recovery import order
from recovery.job import Job
from recovery.wire import Extra

HOLD_LIMIT_S = 10.0
ABORT_LOOK_S = 0.05
PACE_SLICE_S = 0.02


class _Lasting:
    """A fault in force, and until when."""

    def __init__(self, fault: Fault, command: Mapping[str, Any], step: int) -> None:
        self.fault = fault
        self.id: str = command["fault"]
        self.occurrence: int = command["occurrence"]
        seconds, steps = command["duration_s"], command["duration_steps"]
        self.until_s = time.monotonic() + seconds if seconds is not None else float("inf")
        self.until_step = step + steps if steps is not None else float("inf")


@dataclass(frozen=True, kw_only=True)
class _Next:
    """What a fault still has to do, at the same phase of a later step."""

    phase: str
    after_step: int
    surface: str | None
    command: dict[str, Any]
    action: Callable[[], None]


class FaultAgent:
    """Implements ``recovery.job.Probe`` for the training thread and ``RankTarget`` for faults. ``kinds``: that may act
    here; they are loaded now."""

    def __init__(self, job: Job, group: str | None = None, kinds: Iterable[str] = ()) -> None:
        for kind in kinds:  # an import in the middle of a step would be taken for what the fault costs
            _kind(kind)
        self._job = job
        self._armed: dict[tuple[int, str], list[dict[str, Any]]] = {}
        self._lasting: list[_Lasting] = []
        self._go: dict[str, Any] | None = None
        self._answer = threading.Event()
        self.slowness = Slowness(process=job.config.process, group=group, sleep=self._sleep)
        self.active = False
        self._holds = ""  # at a point for this fault, until the supervisor answers
        self.rank = -1
        self.step = 0
        self.seed = 0
        self.disk = DiskShim(sleep=self._stall, die=_die, say=self._effect)
        self.body = BodyShim(job)
        self.signs = SignsShim(job.marks)
        self._tensors = TensorShim(job)
        self._data_delay_s = 0.0
        self._standing: list[dict[str, Any]] = []
        self._installed: set[tuple[str, int]] = set()
        self._poisoned: set[int] = set()
        self._next: list[_Next] = []
        self._acting: Fault | None = None
        self.model = job.state.model

    @property
    def optimizer(self) -> Any:
        """See chaos.targets.RankTarget."""
        return self._job.state.optimizer

    # ---- called by the agent thread

    def on_command(self, topic: str, payload: dict[str, Any]) -> None:
        """``arm``: {"points": [...]} replaces what is armed; ``go``: act now (or not, ``act`` False)."""
        if topic == "arm":
            self.slowness.began()
            armed: dict[tuple[int, str], list[dict[str, Any]]] = {}
            for point in payload["points"]:
                armed.setdefault((point["step"], point["phase"]), []).append(point)
            self._armed = armed
            self._standing = payload["standing"]
            self.active = bool(armed or self._standing or self._lasting or self._next or self.body.broken)
        elif topic == "go" and payload["fault"] == self._holds:
            self._go = payload
            self._answer.set()
        elif topic == "go":
            self._miss(payload)
        elif topic == "hog":
            self.body.hog(payload["at_most_mib"])
        elif topic == "pace":
            rate = payload["bytes_per_s"]
            bucket = _TokenBucket(rate, payload["latency_s"], self._sleep) if rate else None
            self._job.reducer.pace = bucket.take if bucket else None
        elif topic == "disk":
            self.disk.break_next_save(payload)
            self._job.checkpoints.disk = self.disk

    # ---- called by the training thread (recovery.job.Probe)

    def at(self, step: int, phase: str) -> None:
        """Hold at each fault armed for this point until the supervisor answers."""
        if self._standing:
            self._install_standing()
        for point in (*self._armed.pop((step, phase), ()), *self._armed.pop((NEXT_STEP, phase), ())):
            self.step, self.rank, self.seed = step, self._job.rank, point["seed"]
            self._answer.clear()
            self._holds = point["fault"]
            where = {"fault": point["fault"], "step": step, "phase": phase}
            self._job.agent.channel.send(Extra(topic="at_point", payload=where))
            try:
                answered = self._wait_for_answer()
            finally:
                self._holds = ""
            if not answered:
                self._job.agent.channel.send(Extra(topic="unanswered", payload=where))
            elif self._go is not None and self._go["act"]:
                self._act(self._go, step)

        if phase == "data" and self._data_delay_s:
            self._stall(self._data_delay_s)
        if self._next:
            self._do_next(step, phase)

    def _install_standing(self) -> None:
        """What acts in all ranks acts in this one too, though it joined later."""
        standing, self._standing = self._standing, []
        for command in standing:
            if (command["fault"], command["occurrence"]) not in self._installed:
                self.rank, self.seed = self._job.rank, command["seed"]
                self._go = command
                self._act(command, command["step"])

    def _do_next(self, step: int, phase: str) -> None:
        due = [item for item in self._next if item.phase == phase and item.after_step < step]
        for item in due:
            self._next.remove(item)
            self.step, self.rank, self._go = step, self._job.rank, item.command
            before = self._tensors.digest(item.surface)
            item.action()
            if before is not None:
                self._effect(item.command, {"before": before, "after": self._tensors.digest(item.surface)})

    def ended(self, phase: str, seconds: float) -> None:
        """Stretch compute phases while slowed down."""
        self.body.check()
        self.slowness.ended(phase, seconds)

    def committed(self, step: int) -> None:
        """End faults whose time is over."""
        for lasting in list(self._lasting):
            if step >= lasting.until_step or time.monotonic() >= lasting.until_s:
                self._heal(lasting)

    # ---- RankTarget

    def set_slowdown(self, factor: float, mode: str = "duty-cycle") -> str:
        """See chaos.targets.RankTarget."""
        return self.slowness.set(factor, mode)

    def set_disk(self, trouble: DiskTrouble | None) -> None:
        """See chaos.targets.RankTarget."""
        self.disk.set_trouble(trouble, self.seed)
        self._job.checkpoints.disk = self.disk if self.disk.active else None

    def tensors(self, surface: str) -> Mapping[str, Any]:
        """See chaos.targets.RankTarget."""
        return self._tensors.stored(surface)

    def change_forward(self, surface: str, change: Callable[[Any], None]) -> None:
        """See chaos.targets.RankTarget."""
        self._tensors.change_forward(surface, change, self.seed, partial(self._effect, self._go or {}))

    def change_rng(self, change: Callable[[int], int]) -> None:
        """See chaos.targets.RankTarget."""
        self._tensors.change_rng(change, partial(self._effect, self._go or {}))

    def shift_samples(self, by: int) -> None:
        """See chaos.targets.RankTarget."""
        self._tensors.shift_samples(by, partial(self._effect, self._go or {}))

    def due_samples(self) -> Sequence[int]:
        """See chaos.targets.RankTarget."""
        config = self._job.config
        return order.batch(self.step, config.global_batch, config.samples, config.seed)

    def poison_sample(self, sample: int | None) -> None:
        """See chaos.targets.RankTarget."""
        self._poisoned = set() if sample is None else self._poisoned | {sample}
        self._job.spoil = self._spoil if self._poisoned else None

    def _spoil(self, samples: list[int], loss: Tensor) -> Tensor:
        return loss * float("nan") if self._poisoned.intersection(samples) else loss

    def set_data_delay(self, seconds: float) -> None:
        """See chaos.targets.RankTarget."""
        self._data_delay_s = seconds  # from this very step on: the act comes first

    def next_step(self, action: Callable[[], None]) -> None:
        """See chaos.targets.RankTarget."""
        fault, command = self._acting, self._go
        if fault is None or command is None:
            raise RuntimeError("only an act has a next step")
        surface = getattr(fault, "surface", None)
        phase = fault.point("forward")
        self._next.append(
            _Next(phase=phase, after_step=self.step, surface=surface, command=command, action=action)
        )
        self.active = True

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        """See chaos.targets.RankTarget."""
        command = self._go or {}

        def changed(loss: Tensor) -> Tensor:
            result = change(loss)
            self._effect(
                command, {"before": digest([loss]), "after": digest([result]), "value": str(float(result))}
            )
            return result

        self._job.current.change_loss = changed

    # ---- acting

    def _act(self, command: dict[str, Any], step: int) -> None:
        fault = _kind(command["kind"])(**command["params"])
        if fault.where is not Where.RANK:
            return
        self.step = step
        if fault.everywhere:
            self._installed.add((command["fault"], command["occurrence"]))
        surface = getattr(fault, "surface", None)
        before = self._tensors.digest(surface)
        self._acting = fault
        try:
            done = dict(fault.act(self))
        except LookupError as error:  # as an optimizer's state before its first step: it does not land
            self._effect(command, {"nothing": str(error)})
            return
        if before is not None:
            done |= {"before": before, "after": self._tensors.digest(surface)}
        self._effect(command, done)
        if fault.lasting:
            self._lasting.append(_Lasting(fault, command, step))
            self.active = True

    def _heal(self, lasting: _Lasting) -> None:
        lasting.fault.heal(self)
        self._lasting.remove(lasting)
        self.active = bool(self._armed or self._lasting or self._next or self.body.broken)
        command = {"fault": lasting.id, "occurrence": lasting.occurrence}
        self._job.agent.channel.send(Extra(topic="healed", payload=command))

    def _effect(self, command: Mapping[str, Any], evidence: Mapping[str, Any]) -> None:
        """Log what was seen."""
        job = self._job
        data = {"fault": command["fault"], "occurrence": command["occurrence"], "evidence": dict(evidence)}
        job.marks.wrote(job.writer.write(Kind.FAULT_EFFECT, step=self.step, **data).seq)

    def _miss(self, go: Mapping[str, Any]) -> None:
        """The word to act came too late: the supervisor is to arm the fault again."""
        if go["act"]:
            about = {"fault": go["fault"], "occurrence": go["occurrence"]}
            self._job.agent.channel.send(Extra(topic="missed", payload=about))

    def _wait_for_answer(self) -> bool:
        """Whoever is held for a fault is not hung: only the fault itself may look like that."""
        deadline = time.monotonic() + HOLD_LIMIT_S
        while not self._answer.wait(ABORT_LOOK_S):
            self._job.check()
            self._job.marks.touch()
            if time.monotonic() > deadline:
                return False
        return True

    def _stall(self, seconds: float) -> None:
        """Sleep without a sign of life, as in a call that does not return; an abort ends it."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, PACE_SLICE_S))
            self._job.check()

    def _sleep(self, seconds: float) -> None:
        """Sleep in slices, showing progress (a slow rank is not a hung one) and noticing an abort."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, PACE_SLICE_S))
            self._job.marks.touch()
            self._job.check()


def _kind(name: str) -> type[Fault]:
    return plugins.one("chaos.faults", Fault, name)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _TokenBucket:
    """Lets ``rate`` bytes a second pass, with a burst of one slice."""

    def __init__(self, rate: float, latency_s: float, sleep: Callable[[float], None]) -> None:
        self._rate = rate
        self._latency_s = latency_s
        self._sleep = sleep
        self._free_at = 0.0

    def take(self, size: int) -> None:
        """Return when ``size`` more bytes may have passed."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size / self._rate
        self._sleep(self._free_at - now + self._latency_s)
