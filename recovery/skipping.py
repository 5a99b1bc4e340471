"""Samples that the job leaves out, by themselves or with a whole share that was not finite, and from which step on."""

from __future__ import annotations

from dataclasses import replace

from chaos.events import Kind
from recovery.failures import FailureBook
from recovery.fallback import SKIP_WINDOW_STEPS
from recovery.strategy import Cause, Failure, Form
from recovery.supervision import Hands


class Skips:
    """Part of the job's state, kept by the supervisor and told to every rank that joins."""

    def __init__(self, hands: Hands, failures: FailureBook) -> None:
        self.samples: dict[int, int] = {}  # sample -> first step without it
        self._hands = hands
        self._failures = failures
        self._named: dict[str, tuple[int, ...]] = {}

    @property
    def examine(self) -> int:
        """The step at which a further non-finite value is to be traced to its samples; 0: none."""
        book = self._failures
        failed = [f.step for f in (*book.history, *book.current) if f.cause is Cause.NONFINITE]
        return failed[-1] if failed else 0

    @property
    def lately(self) -> int:
        """How many were left out in the steps before the failure at hand."""
        step = self._failures.current[-1].step if self._failures.current else 0
        return sum(1 for since in self.samples.values() if since > step - SKIP_WINDOW_STEPS)

    def note(self, process: str, samples: list[int]) -> None:
        """A rank names the samples that are to blame."""
        self._named[process] = tuple(samples)

    def with_samples(self, failures: list[Failure]) -> tuple[Failure, ...]:
        """The failures, each with the samples that its process has named."""
        return tuple(replace(f, samples=self._named.get(f.process, ())) for f in failures)

    def take(self, form: Form) -> None:
        """Leave out what a decision says, and write that down."""
        self._named = {}
        new = [sample for sample in form.skip if sample not in self.samples]
        if new:
            self.samples |= dict.fromkeys(new, form.skip_from)
            self._hands.record(Kind.SAMPLES_SKIPPED, step=form.skip_from, samples=new, since=form.skip_from)
