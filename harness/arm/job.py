"""The interface between the loop of an arm (``harness.arm.loop``) and the job that trains in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class OpeningFacts:
    """What the first events of an arm say. ``process``: data of ``actor_started``; ``spares``: that
    the job starts with; ``facts``: the data of ``run_started`` that depend on the kind of job.
    """

    process: Mapping[str, Any]
    spares: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """What stop conditions are judged by. ``progress_ns``: when a step was last committed, or could
    first have been; ``healthy``: replicas whose ranks are all held by live processes, None until
    training has begun; ``nonfinite``: a loss that is NaN or infinite was reported.
    """

    progress_ns: int
    healthy: int | None
    nonfinite: bool = False


@dataclass(frozen=True, kw_only=True)
class ClosingFacts:
    """What the last events of an arm say. ``leftovers``: data of ``leftovers``; ``finished``: data
    of ``run_finished`` beside outcome and reason.
    """

    leftovers: Mapping[str, Any]
    finished: Mapping[str, Any]


class ArmJob(Protocol):
    """A job that an arm plays; the methods stand in the order in which they are called."""

    @property
    def generation(self) -> int:
        """The current generation; every event carries it."""

    @property
    def committed(self) -> int:
        """Steps committed so far."""

    @property
    def outcome(self) -> str:
        """How the job ended; empty while it runs."""

    @property
    def reason(self) -> str:
        """Why it ended, for people."""

    @property
    def ending(self) -> bool:
        """Whether the end is decided, so that stop conditions no longer matter."""

    @property
    def over(self) -> bool:
        """Whether it has ended and needs no further turn."""

    def introduce(self) -> OpeningFacts:
        """Describe it, before anything else is done."""

    def prepare(self) -> None:
        """Prepare what faults act on, before the faults are announced."""

    def start(self) -> None:
        """Start the job's first processes."""

    def turn(self) -> None:
        """Wait briefly for events, process them, and let the injector act."""

    def settle(self) -> None:
        """Process what arrived while faults and timers acted, and notice the end of the job."""

    def vitals(self) -> Vitals:
        """The job's state, for the stop conditions of the scenario."""

    def out_of_patience(self) -> tuple[str, str] | None:
        """Outcome and reason when one of the job's own deadlines has passed, else None."""

    def stop(self, outcome: str, reason: str) -> None:
        """End the job in order; does nothing when it is ending already."""

    def fail(self, outcome: str, reason: str) -> None:
        """An error ends the arm: record the outcome at once, unless there is one."""

    def end_processes(self) -> None:
        """End all its processes and record their exits."""

    def release(self) -> None:
        """Release what the job holds of the machine; called even when ``end_processes`` failed."""

    def account(self) -> ClosingFacts:
        """What is left of the job."""
