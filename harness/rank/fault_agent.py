"""The fault injector's agent inside a rank: holds the rank at a planned point, acts on command, and
measures the effect.

The supervisor decides. The agent only reports ``at_point`` and waits for ``go``, so that the undo
record and the ``fault_injected`` event are on disk before anything happens, for faults from outside
and from inside alike. ``harness.rank.shims.agenda`` decides what is due when, as in a simulated
rank; this module implements the waits of a real rank, and the acts of its body.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from torch import Tensor

from trainchaos.chaos import plugins
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.fault.targets import DiskTrouble
from trainchaos.harness.rank.shims.agenda import Acted, HoldAnswer, Stall
from trainchaos.harness.rank.shims.agent import AgentCore
from trainchaos.harness.rank.shims.body import BodyShim
from trainchaos.harness.rank.shims.signs import SignsShim
from trainchaos.harness.rank.shims.slowness import Slowness
from trainchaos.harness.rank.shims.tensors import TensorShim, digest
from trainchaos.recovery.rank.job import Job
from trainchaos.recovery.transport.wire import Extra

PACE_SLICE_S = 0.02


class FaultAgent(AgentCore):
    """Implements ``recovery.rank.step.StepProbe`` for the training thread and ``RankTarget`` for
    faults. ``kinds``: faults that may act here; loaded now.
    """

    body: BodyShim

    def __init__(self, job: Job, group: str | None = None, kinds: Iterable[str] = ()) -> None:
        # an import in the middle of a step would be counted as the fault's cost
        for kind in kinds:
            plugins.one(plugins.FAULTS, Fault, kind)
        super().__init__(job.config, sleep=self._stall, die=_die, lock=threading.Lock())
        self._job = job
        self._word = threading.Event()  # an answer may have arrived
        self.slowness = Slowness(process=job.config.process, group=group, sleep=self._sleep)
        self.body = BodyShim(job)
        self.signs = SignsShim(job.marks, self._agenda.wanted)
        self._tensors = TensorShim(job)

    @property
    def model(self) -> Any:
        """See chaos.fault.targets.RankTarget."""
        return self._job.state.model

    @property
    def optimizer(self) -> Any:
        return self._job.state.optimizer

    # ---- called by the agent thread

    def on_command(self, topic: str, payload: dict[str, Any]) -> None:
        """Handle a message of the injector to this rank."""
        if topic == "arm":
            self.slowness.began()
        elif topic == "hog":
            self.body.hog(payload["at_most_mib"])
        elif topic == "pace":
            rate = payload["bytes_per_s"]
            bucket = _TokenBucket(rate, payload["latency_s"], self._sleep) if rate else None
            self._job.reducer.pace = bucket.take if bucket else None
        elif topic == "disk":
            self.disk.break_next_save(payload)
            self._job.checkpoints.disk = self.disk
        if self._agenda.hear(topic, payload):
            self._word.set()

    # ---- called by the training thread (recovery.rank.step.StepProbe)

    def at(self, step: int, phase: str) -> None:
        """Hold at each fault armed for this point until the supervisor answers, and do what is due
        here.
        """
        with closing(self._agenda.at(step, phase, rank=self._job.rank)) as waits:
            for wait in waits:
                match wait:
                    case HoldAnswer():
                        self._held(wait)
                    case Stall():
                        self._stall(wait.seconds)
                    case Acted():
                        pass  # an act that blocks has already blocked

    def ended(self, phase: str, seconds: float) -> None:
        """Stretch compute phases while slowed down."""
        self.body.check()
        self.slowness.ended(phase, seconds)

    # ---- RankTarget

    def set_slowdown(self, factor: float, mode: str = "duty-cycle") -> str:
        wanted = self._agenda.wanted("slowdown", (factor, mode) if factor > 1 else None)
        return self.slowness.set(*(wanted[-1] if wanted else (1.0, mode)))

    def set_disk(self, trouble: DiskTrouble | None) -> None:
        super().set_disk(trouble)
        self._job.checkpoints.disk = self.disk if self.disk.active else None

    def tensors(self, surface: str) -> Mapping[str, Any]:
        return self._tensors.stored(surface)

    def change_forward(self, surface: str, change: Callable[[Any], None]) -> None:
        self._tensors.change_forward(surface, change, self.seed, self._say())

    def change_rng(self, change: Callable[[int], int]) -> None:
        self._tensors.change_rng(change, self._say())

    def shift_samples(self, by: int) -> None:
        self._tensors.shift_samples(by, self._say())

    def poison_sample(self, sample: int | None) -> None:
        super().poison_sample(sample)
        self._job.spoil = self._spoil if self.poisoned else None

    def _spoil(self, samples: list[int], loss: Tensor) -> Tensor:
        return loss * float("nan") if self.poisoned.intersection(samples) else loss

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        say = self._say()

        def changed(loss: Tensor) -> Tensor:
            result = change(loss)
            say({"before": digest([loss]), "after": digest([result]), "value": str(float(result))})
            return result

        self._job.current.change_loss = changed

    # ---- for the agenda (harness.rank.shims.agenda.AgendaRank)

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def say(self, topic: str, payload: dict[str, Any]) -> None:
        self._job.agent.channel.send(Extra(topic=topic, payload=payload))

    def log(self, *, step: int, fault: str, occurrence: int, evidence: dict[str, Any]) -> None:
        event = self._job.writer.write(
            Kind.FAULT_EFFECT, step=step, fault=fault, occurrence=occurrence, evidence=evidence
        )
        self._job.marks.wrote(event.seq)

    def do(self, action: Callable[[], None], surface: str | None, /) -> Mapping[str, Any] | None:
        before = self._tensors.digest(surface)
        action()
        return (
            None if before is None else {"before": before, "after": self._tensors.digest(surface)}
        )

    # ---- waiting

    def _held(self, hold: HoldAnswer) -> None:
        """Wait until the supervisor answers; an abort ends the wait."""
        deadline = time.monotonic() + hold.limit_s
        while not self._agenda.answered:
            if self._word.wait(hold.look_s):
                self._word.clear()
                continue
            self._job.check()
            self._job.marks.touch()
            if time.monotonic() > deadline:
                return

    def _stall(self, seconds: float) -> None:
        """Sleep without a sign of life, as in a call that does not return; an abort ends it."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, PACE_SLICE_S))
            self._job.check()

    def _sleep(self, seconds: float) -> None:
        """Sleep in slices, showing progress (a slow rank is not a hung one) and checking for an
        abort.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, PACE_SLICE_S))
            self._job.marks.touch()
            self._job.check()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _TokenBucket:
    """Lets ``rate`` bytes per second pass, with a burst of one slice."""

    def __init__(self, rate: float, latency_s: float, sleep: Callable[[float], None]) -> None:
        self._rate = rate
        self._latency_s = latency_s
        self._sleep = sleep
        self._free_at = 0.0

    def take(self, size: int) -> None:
        """Return once ``size`` more bytes may pass."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size / self._rate
        self._sleep(self._free_at - now + self._latency_s)
