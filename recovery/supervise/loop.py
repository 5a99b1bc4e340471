"""The loop around a job: begin, turn until it is over, end, and one event log of all that.

``recovery.run``, an arm of built-in ranks and an arm of a user's command all go through it; an
observer follows, and may stop the job.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.events.log import Event, EventWriter, Kind
from trainchaos.recovery.supervise.supervision import StopFlag


class Observer:
    """Follows a job; here each method does nothing."""

    def on_event(self, event: Event) -> None:
        """The supervisor wrote an event."""

    def before_start(self) -> None:
        """All is prepared, and nothing is started yet."""

    def after_turn(self) -> None:
        """The job has made a turn."""

    def after_end(self) -> None:
        """Its processes have ended, and it has not let go of the machine yet."""


class Loop(ABC):
    """One job. The methods that a job has stand in the order in which they are called; ``log``:
    where its events go; ``stop``: set by a signal, which ends the job in order.
    """

    observer: Observer

    def __init__(self, log: EventWriter, stop_flag: StopFlag) -> None:
        self.log, self.stop_flag = log, stop_flag

    def run(self) -> str:
        """Run the job to its end and return the outcome: completed, gave-up, broken, interrupted or
        halted. Every process has ended and every observed change is undone afterwards, also after
        an error, which is raised again.
        """
        self.introduce()
        try:
            self.start()
            while not self.over:
                self.turn()
                if self.stop_flag.signum:
                    self.stop("interrupted", signal.Signals(self.stop_flag.signum).name)
                self.observer.after_turn()
        except BaseException as error:
            outcome = "interrupted" if isinstance(error, KeyboardInterrupt) else "broken"
            self.fail(outcome, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._end()
        return self.outcome

    def _end(self) -> None:
        """The job releases the machine even when its processes cannot be ended, as on a disk that
        takes no more events.
        """
        try:
            self.end_processes()
            self.observer.after_end()
        finally:
            self.release()
        left, finished = self.account()
        self.record(Kind.LEFTOVERS, **left)
        outcome = self.outcome or "broken"
        self.record(Kind.RUN_FINISHED, outcome=outcome, reason=self.reason, **finished)
        self.log.close()

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        self.log.generation = self.generation
        event = self.log.write(kind, step=step, generation=generation, **data)
        self.observer.on_event(event)
        return event

    # ---- what a job has

    @property
    @abstractmethod
    def generation(self) -> int:
        """The current generation; every event carries it."""

    @property
    @abstractmethod
    def outcome(self) -> str:
        """How the job ended; empty while it runs."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why it ended, for people."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether the job has ended and needs no further turn."""

    @abstractmethod
    def introduce(self) -> None:
        """Write the first events."""

    @abstractmethod
    def start(self) -> None:
        """Start the first processes, or take over those that there are. Where an observer acts on
        what is prepared for them, the job tells it first (``before_start``).
        """

    @abstractmethod
    def turn(self) -> None:
        """Wait briefly for reports, and act on them."""

    @abstractmethod
    def stop(self, outcome: str, reason: str) -> None:
        """End the job in order; does nothing when it is ending already."""

    @abstractmethod
    def fail(self, outcome: str, reason: str) -> None:
        """An error ends the job: set the outcome at once, unless there is one."""

    @abstractmethod
    def end_processes(self) -> None:
        """End all processes and record their exits."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the machine; called even when ``end_processes`` failed."""

    @abstractmethod
    def account(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The data of ``leftovers``, and of ``run_finished`` beside outcome and reason."""
