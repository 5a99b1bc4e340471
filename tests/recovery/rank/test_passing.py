"""A lost generation ends a pass at the next part of the model: only in the rank's own passes, and
never once the step may be applied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.rank.step import Step, StepInProgress


def in_step(phase: str, *, busy: object = None) -> StepInProgress:
    """A loop in its step, in this phase, of a generation that is lost."""

    def check() -> None:
        raise GenerationLost("aborted by the supervisor")

    anything: Any = SimpleNamespace(entered=lambda: busy)
    progress = StepInProgress(marks=anything, blocks=anything)
    step = Step.__new__(Step)
    step._phase, step._job = phase, SimpleNamespace(check=check)  # type: ignore[assignment]
    progress.begin(step)
    return progress


@contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr("torch.compiler.is_compiling", lambda: True)
        yield


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_pass_that_is_thrown_away_ends(phase: str) -> None:
    with pytest.raises(GenerationLost):
        in_step(phase).passing()


@pytest.mark.parametrize("phase", ["collective", "optimizer", "checkpoint"])
def test_what_follows_the_reduction_is_never_cut_off(phase: str) -> None:
    in_step(phase).passing()


def test_calls_of_the_script_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    in_step("forward", busy="evaluation").passing()
    ended = in_step("forward")
    ended.end()
    ended.passing()
    with compiling(monkeypatch):
        in_step("forward").passing()
    progress, raised = in_step("forward"), list[BaseException]()

    def elsewhere() -> None:
        try:
            progress.passing()
        except GenerationLost as error:
            raised.append(error)

    other = threading.Thread(target=elsewhere)
    other.start()
    other.join(120)
    assert not other.is_alive() and not raised
