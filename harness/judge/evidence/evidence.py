"""What a checker gets as evidence, and the three answers that it can give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainchaos.chaos.events.log import Log
from trainchaos.chaos.scenario.model import Cell, FaultSpec
from trainchaos.harness.judge.evidence.expected import Expected
from trainchaos.harness.judge.measure.measure import ArmMeasures, measure
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.results import Finding

WARNING = "warning: "
"""Begins the witness of a finding that passes, and that people have to see all the same."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Logs of one arm and what they are compared with.

    ``control``: the paired control arm of a faulted one (None: there is none); ``controls``: every
    control arm of the run with the same workload; ``exact``: strategy name -> whether it promises a
    bit-identical result; ``source``, ``lines``: the scenario file, and the lines of its workload's
    keys; ``expected``: what the scenario says that this arm should be.
    """

    arm: str
    cell: Cell
    log: Log
    control: Log | None = None
    controls: tuple[Log, ...] = ()
    exact: Mapping[str, bool] = field(default_factory=dict)
    source: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    expected: Expected = field(default_factory=Expected)

    @cached_property
    def measures(self) -> ArmMeasures:
        """Everything measured on this arm."""
        return measure(self.log, self.control)

    @property
    def history(self) -> History:
        """This arm's history."""
        return self.measures.history

    @cached_property
    def control_history(self) -> History | None:
        """The control arm's history."""
        return history_of(self.control) if self.control is not None else None

    @property
    def is_control(self) -> bool:
        """Whether this arm is the control arm."""
        return self.arm == "control"

    @property
    def promises_exact(self) -> bool:
        """Whether this arm promises a bit-identical result: by its strategy, or by how gradients
        are summed.
        """
        return self.elastic or self.keeps_world

    @property
    def keeps_world(self) -> bool:
        """Whether this arm's strategy promises a bit-identical result, and therefore never makes a
        step with fewer ranks.
        """
        return self.exact.get(self.cell.scenario.recovery.strategy, False)

    @property
    def elastic(self) -> bool:
        """Whether the number of ranks makes no difference to the result."""
        return self.cell.scenario.workload.determinism == "elastic"

    @property
    def shrinks_batch(self) -> bool:
        """Whether the scenario drops the samples of dead ranks."""
        return self.cell.scenario.recovery.params.get("batch") == "shrink"

    def place(self, key: str) -> str:
        """``kill.yaml:9 (workload.command): `` for a message; "" if the line is not known."""
        line = self.lines.get(key)
        return f"{self.source.rsplit('/', 1)[-1]}:{line} ({key}): " if line else ""

    def fault(self, name: str) -> FaultSpec | None:
        """The scenario's fault of that id."""
        return next((fault for fault in self.cell.scenario.faults if fault.id == name), None)

    def expects(self, outcome: str) -> list[str]:
        """Ids of faults whose expected outcome is ``outcome``."""
        return [fault.id for fault in self.cell.scenario.faults if outcome in fault.expect.outcomes]


Checker = Callable[[Evidence], Finding]


def passed(witness: str) -> Finding:
    """The invariant holds, as shown."""
    return Finding(verdict="pass", witness=witness)


def failed(witness: str) -> Finding:
    """The invariant is violated, as shown."""
    return Finding(verdict="fail", witness=witness)


def unknown(missing: str) -> Finding:
    """The evidence does not suffice; ``missing`` says what is missing."""
    return Finding(verdict="inconclusive", witness=missing)


def some(items: list[str], limit: int = 3) -> str:
    """The first few of many, and how many more there are."""
    more = len(items) - limit
    return "; ".join(items[:limit]) + (f"; and {more} more" if more > 0 else "")


def verdict_of(problems: list[str], witness: str, missing: Sequence[str] = ()) -> Finding:
    """Fail with the problems; where there are none, inconclusive with what is missing; else pass
    with the witness.
    """
    if problems:
        return failed(some(problems))
    return unknown(some([*missing])) if missing else passed(witness)
