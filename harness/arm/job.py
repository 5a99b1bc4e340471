"""What the loop of an arm asks of the job that trains in it (``harness.arm.loop``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Introduction:
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
    training has begun; ``nonfinite``: a loss that is no number was reported.
    """

    progress_ns: int
    healthy: int | None
    nonfinite: bool = False


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """What the last events of an arm say. ``leftovers``: data of ``leftovers``; ``finished``: data
    of ``run_finished`` beside outcome and reason.
    """

    leftovers: Mapping[str, Any]
    finished: Mapping[str, Any]


class Job(Protocol):
    """A job that an arm plays; the methods stand in the order in which they are called."""

    @property
    def generation(self) -> int:
        """The present generation; every event carries it."""

    @property
    def committed(self) -> int:
        """Steps committed so far."""

    @property
    def outcome(self) -> str:
        """How it ended; empty while nothing has ended it."""

    @property
    def reason(self) -> str:
        """Why it ended so, for people."""

    @property
    def ending(self) -> bool:
        """Whether its end is decided, so that no stop condition matters any more."""

    @property
    def over(self) -> bool:
        """Whether it has ended and needs no further turn."""

    def introduce(self) -> Introduction:
        """Describe it, before anything else is done."""

    def prepare(self) -> None:
        """Get ready what faults act on, before they are announced."""

    def start(self) -> None:
        """Start the job's first processes."""

    def turn(self) -> None:
        """Wait a moment for something to happen, take it in, and let the injector act."""

    def settle(self) -> None:
        """Take in what is read once faults and timers have acted, and an end by itself."""

    def vitals(self) -> Vitals:
        """Its state, for the stop conditions of the scenario."""

    def out_of_patience(self) -> tuple[str, str] | None:
        """Outcome and reason when the job's own deadlines have passed."""

    def stop(self, outcome: str, reason: str) -> None:
        """End it in order; nothing when it is ending already."""

    def fail(self, outcome: str, reason: str) -> None:
        """An error ends the arm: note the outcome at once, unless there is one."""

    def end_processes(self) -> None:
        """End all its processes and record their exits."""

    def release(self) -> None:
        """Let go of what it holds of the machine; called even when ``end_processes`` failed."""

    def account(self) -> Accounts:
        """Say what is left of it."""
