"""The fault injector's agent inside a simulated rank: its waits, and the acts of its body.

``harness.rank.shims.agenda`` decides what is due when, as in a real rank
(``harness.rank.fault_agent``).
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.rank.shims.agenda import Acted, HoldAnswer, Stall
from trainchaos.harness.rank.shims.agent import AgentCore
from trainchaos.harness.sim.rank.body import SimBody
from trainchaos.harness.sim.rank.tensors import SimLoss, SimModel, SimTensor
from trainchaos.harness.sim.world.clock import NS_PER_S
from trainchaos.harness.sim.world.group import SimGenerationLost
from trainchaos.harness.sim.world.process import Killed
from trainchaos.harness.sim.world.settings import WALL_NS
from trainchaos.recovery.transport.wire import Extra

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank

SLICE_NS = NS_PER_S // 50
Sleeping = Generator[float | None, Any, None]


class TrainingError(Exception):
    """A fault raised in training code."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.kind = type(error).__name__


class SimFaultAgent(AgentCore):
    """Holds its rank at armed points, acts on command, and implements
    ``chaos.fault.targets.RankTarget``.
    """

    body: SimBody

    def __init__(self, job: SimRank) -> None:
        super().__init__(job.config, sleep=_at_once, die=_die)
        self._job = job
        self._holding: int | None = None
        self._look_ns = 0.0
        self._slowdown = 1.0
        self.rationed = 1.0  # slowdown factor from a limit on processor time
        self.idle_ns = 0.0  # of the current phase: it was held or stalled, and computed nothing
        self._rate = 0.0
        self._latency_s = 0.0
        self._free_at_ns = 0.0
        self.body = SimBody(job)
        self.signs = SimSigns(job, self._agenda.wanted)
        self.model = SimModel(b"", b"")
        self.optimizer: Any = None

    # ---- called by the agent

    def on_command(self, topic: str, payload: dict[str, Any]) -> None:
        """Handle a message of the injector to this rank."""
        if topic == "disk":
            self.disk.break_next_save(payload)
        elif topic == "pace":
            self._rate, self._latency_s = payload["bytes_per_s"] or 0.0, payload["latency_s"]
            self._free_at_ns = 0.0
        if self._agenda.hear(topic, payload) and self._holding is not None:
            self._job.process.wake(self._holding)

    def aborted(self) -> None:
        """The generation was aborted: a rank that holds notices at its next look."""
        if self._holding is not None:
            process = self._job.process
            delay = process.rng.uniform(0, self._look_ns)
            process.clock.after(
                delay,
                partial(
                    process.fail, self._holding, SimGenerationLost("aborted by the supervisor")
                ),
            )

    # ---- called by the body

    def at(self, step: int, phase: str) -> Sleeping:
        """Hold at each fault armed for this point until the supervisor answers, and do what is due
        here.
        """
        clock = self._job.process.clock
        began_ns = clock.now_ns
        with closing(self._agenda.at(step, phase, rank=self._job.rank)) as waits:
            for wait in waits:
                match wait:
                    case HoldAnswer():
                        yield from self._held(wait)
                    case Stall():
                        yield from self._stall(wait.seconds * NS_PER_S)
                    case Acted():
                        yield from self.body.blocked()
        self.idle_ns += clock.now_ns - began_ns

    def _held(self, hold: HoldAnswer) -> Sleeping:
        process = self._job.process
        self._holding, self._look_ns = process.ticket, hold.look_s * NS_PER_S
        process.clock.after(hold.limit_s * NS_PER_S, partial(process.wake, process.ticket))
        process.clock.after(self._look_ns, partial(self._still_held, process.ticket))
        try:
            yield None
        finally:
            self._holding = None

    def _still_held(self, ticket: int) -> None:
        """A rank that holds for a fault is not hung."""
        process = self._job.process
        if self._holding == ticket and process.running:
            if not process.stopped and not process.frozen:
                self._job.mark.touch()
            process.clock.after(self._look_ns, partial(self._still_held, ticket))

    def stretched(self, phase: str, spent_ns: float) -> Sleeping:
        """Stretch compute phases while slowed down, as far as something was computed in them."""
        factor, computed_ns = self._slowdown * self.rationed, spent_ns - self.idle_ns
        self.idle_ns = 0.0
        if factor > 1 and computed_ns > 0 and phase in ("forward", "backward"):
            yield from self._sleep((factor - 1) * computed_ns)

    def paced(self, size: int) -> Sleeping:
        """Wait until ``size`` more bytes may pass over the link."""
        if self._rate:
            now = self._job.process.clock.now_ns
            self._free_at_ns = max(now, self._free_at_ns) + size / self._rate * NS_PER_S
            yield from self._sleep(self._free_at_ns - now + self._latency_s * NS_PER_S)

    # ---- RankTarget

    def set_slowdown(self, factor: float, mode: str = "duty-cycle") -> str:
        wanted = self._agenda.wanted("slowdown", factor if factor > 1 else None)
        self._slowdown = wanted[-1] if wanted else 1.0
        return f"simulated {mode}"

    def tensors(self, surface: str) -> Mapping[str, Any]:
        return self.model.stored(surface)

    def change_forward(self, surface: str, change: Callable[[Any], None]) -> None:
        say = self._say()

        def changed(values: list[float]) -> list[float]:
            tensor = SimTensor(list(values))
            change(tensor)
            say({"before": _digest(values), "after": _digest(tensor.values)})
            return tensor.values

        assert self._job.attempt is not None
        self._job.attempt.change_forward.append((surface, changed))

    def change_rng(self, change: Callable[[int], int]) -> None:
        assert self._job.attempt is not None
        before = self._job.attempt.seed
        after = self._job.attempt.seed = change(before)
        self._say()({"before": f"{before:x}", "after": f"{after:x}"})

    def shift_samples(self, by: int) -> None:
        attempt = self._job.attempt
        assert attempt is not None
        before = attempt.samples
        attempt.samples = [(sample + by) % self._job.config.samples for sample in before]
        self._say()({"before": _digest_ids(before), "after": _digest_ids(attempt.samples)})

    def poison_loss(self, change: Callable[[Any], Any]) -> None:
        say = self._say()

        def changed(loss: SimLoss) -> SimLoss:
            result: SimLoss = change(loss)
            before, after = _digest([float(loss)]), _digest([float(result)])
            say({"before": before, "after": after, "value": str(float(result))})
            return result

        assert self._job.attempt is not None
        self._job.attempt.change_loss = changed

    # ---- for the agenda (harness.rank.shims.agenda.AgendaRank)

    def now_ns(self) -> int:
        return self._job.process.clock.now_ns

    def say(self, topic: str, payload: dict[str, Any]) -> None:
        self._job.send(Extra(topic=topic, payload=payload))

    def log(self, *, step: int, fault: str, occurrence: int, evidence: dict[str, Any]) -> None:
        self._job.write(
            Kind.FAULT_EFFECT, step=step, evidence=evidence, fault=fault, occurrence=occurrence
        )

    def do(self, action: Callable[[], None], surface: str | None, /) -> Mapping[str, Any]:
        """See AgendaRank: also applies changes of the stored tensors to the state. Raises
        TrainingError for errors that would end training.
        """
        attempt = self._job.attempt
        assert attempt is not None
        state = self._job.state
        self.model = SimModel(state.parameters, attempt.part.gradient, state.optimizer)
        before = self.model.surfaces()
        try:
            action()
        except LookupError:
            raise
        except Exception as error:
            raise TrainingError(error) from error
        after = self.model.surfaces()
        # Compare digests, since a NaN does not even equal itself.
        changed = sorted(name for name in before if _digest(before[name]) != _digest(after[name]))
        for name in changed:
            attempt.corrupted(name, after[name])
        if not changed:
            return {}
        name = changed[0]
        return {"before": _digest(before[name]), "after": _digest(after[name]), "changed": changed}

    # ---- waiting

    def _stall(self, ns: float) -> Sleeping:
        """Sleep without a sign of life; an abort ends it."""
        until = self._job.process.clock.now_ns + int(ns)
        while (left := until - self._job.process.clock.now_ns) > 0:
            yield min(left, SLICE_NS)
            self._job.check()

    def _sleep(self, ns: float) -> Sleeping:
        """Sleep in slices, showing progress and checking for an abort."""
        until = self._job.process.clock.now_ns + int(ns)
        while (left := until - self._job.process.clock.now_ns) > 0:
            yield min(left, SLICE_NS)
            self._job.mark.touch()
            self._job.check()


def _at_once(seconds: float) -> None:
    """No wait: a save is instantaneous here, and its extra time has been waited for before."""


def _die() -> None:
    raise Killed(signal.SIGKILL)


def _digest_ids(samples: list[int]) -> str:
    return _digest([float(sample) for sample in samples])


def _digest(values: list[float]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


class SimSigns:
    """Implements ``chaos.fault.targets.Signs``."""

    def __init__(self, job: SimRank, wanted: Callable[[str, Any], list[Any]]) -> None:
        self._job = job
        self._wanted = wanted
        self._offset_s = 0.0

    def drop_heartbeat(self, dropped: bool) -> None:
        mark = self._job.mark
        (mark.hide if self._wanted("heartbeat", dropped or None) else mark.show)()

    def set_wall_offset(self, seconds: float) -> None:
        offsets = self._wanted("clock", seconds or None)
        self._offset_s = offsets[-1] if offsets else 0.0

    def wall_ns(self) -> int:
        """See chaos.fault.targets.Signs; counted from the start of the log."""
        since_ns = self._job.process.clock.now_ns - self._job.started_ns
        return WALL_NS + since_ns + int(self._offset_s * NS_PER_S)
