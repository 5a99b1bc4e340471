"""Samples that the job leaves out, alone or with a whole share that was not finite, and from which
step on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.corruption import SKIP_WINDOW_STEPS
from trainchaos.recovery.policy.strategy import Cause, Failure, Form
from trainchaos.recovery.supervise.failures import FailureBook
from trainchaos.recovery.supervise.process_table import Process
from trainchaos.recovery.supervise.supervision import Hands
from trainchaos.recovery.transport.wire import MOST_LEFT_OUT, LeaveOut


class ExcludedSamples:
    """Part of the job's state, kept by the supervisor and sent to every process once."""

    def __init__(self, hands: Hands, failures: FailureBook) -> None:
        self._since: dict[int, int] = {}  # sample -> first step without it
        self._order: list[int] = []  # the samples, as they were found
        self._hands = hands
        self._failures = failures
        self._named: dict[str, tuple[int, ...]] = {}

    @property
    def examine(self) -> int:
        """The step at which a further non-finite value is traced to its samples; 0: none."""
        book = self._failures
        failed = [f.step for f in (*book.history, *book.current) if f.cause is Cause.NONFINITE]
        return failed[-1] if failed else 0

    @property
    def lately(self) -> int:
        """How many were excluded in the steps before the current failure."""
        step = self._failures.current[-1].step if self._failures.current else 0
        return sum(1 for since in self._since.values() if since > step - SKIP_WINDOW_STEPS)

    def restore(self, samples: Mapping[int, int]) -> None:
        """Continue where another supervisor stopped; what that one sent to which process is
        unknown.
        """
        self._since, self._order = dict(samples), list(samples)

    def send_missing(self, process: Process) -> int:
        """Send a process the excluded samples that it lacks; returns how many there are in all."""
        while process.exclusions_sent < len(self._order):
            new = self._order[process.exclusions_sent : process.exclusions_sent + MOST_LEFT_OUT]
            since = [self._since[sample] for sample in new]
            self._hands.send(
                process.name, LeaveOut(after=process.exclusions_sent, samples=new, since=since)
            )
            process.exclusions_sent += len(new)
        return len(self._order)

    def note(self, process: str, samples: list[int]) -> None:
        """A rank names the samples to blame."""
        self._named[process] = tuple(samples)

    def with_samples(self, failures: list[Failure]) -> tuple[Failure, ...]:
        """The failures, each with the samples that its process has named."""
        return tuple(replace(f, samples=self._named.get(f.process, ())) for f in failures)

    def take(self, form: Form) -> None:
        """Exclude the samples of a decision, and record them."""
        self._named = {}
        new = [sample for sample in dict.fromkeys(form.skip) if sample not in self._since]
        if new:
            self._since |= dict.fromkeys(new, form.skip_from)
            self._order += new
            # bounds the length of a log line: the shares of many ranks are many samples
            for start in range(0, len(new), MOST_LEFT_OUT):
                some = new[start : start + MOST_LEFT_OUT]
                self._hands.record(
                    Kind.SAMPLES_SKIPPED, step=form.skip_from, samples=some, since=form.skip_from
                )
