"""What the script of the built-in stacks reports: each step once, also one that is committed after
a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.harness.peers import ours


class FakeJob:
    """A job of three steps; the group of step 2 breaks after the reduction, which the next group
    then commits.
    """

    rank = 0

    def __init__(self) -> None:
        self.state = SimpleNamespace(step=0, last=(0, 0.0))
        self.checkpoints = SimpleNamespace(disk=None)
        self.broken = False

    def attach(self, *_: object, **__: object) -> None:
        """Nothing to do."""

    def running(self) -> bool:
        if self.broken:
            self.broken = False
            self.commit(2)
        return self.state.step < 3

    def commit(self, step: int) -> None:
        self.state.step, self.state.last = step, (step, step / 10)

    @contextmanager
    def step(self) -> Iterator[Any]:
        number = self.state.step + 1
        with_failure = number == 2

        def commit() -> None:
            if with_failure:
                raise ConnectionError("the group is lost")
            self.commit(number)

        try:
            yield SimpleNamespace(
                number=number, samples=[1, 2], count=2, backward=lambda _: None, commit=commit
            )
        except ConnectionError:
            self.broken = True


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float, int]]:
    """What is reported: (step, loss, samples)."""
    made: list[tuple[int, float, int]] = []
    training = SimpleNamespace(
        samples=8,
        job=SimpleNamespace(steps=3, global_batch=2, seed=1),
        optimizer=None,
        scheduler=None,
        clip_norm=0.0,
        model=SimpleNamespace(parameters=list),
        loss=lambda *_: None,
        report=lambda step, loss, samples: made.append((step, loss, samples)),
    )
    monkeypatch.setattr(ours, "Training", SimpleNamespace(from_environment=lambda: training))
    monkeypatch.setattr(ours.recovery, "join", lambda **_: FakeJob())
    monkeypatch.setattr(ours, "point", lambda *_: None)
    monkeypatch.setenv("RANK", "0")
    return made


def test_a_step_that_is_committed_after_a_failure_is_reported_once(
    reports: list[tuple[int, float, int]],
) -> None:
    """Else its samples would count as lost."""
    ours.main()
    assert reports == [(1, 0.1, 2), (2, 0.2, 2), (3, 0.3, 2)]
