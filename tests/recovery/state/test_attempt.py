"""A step that is done again begins with the bits with which the lost attempt began, whatever the
model and the script change in it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.zoo import MEMBERS, WIDTH, Zoo
from trainchaos.recovery.state import attempt
from trainchaos.recovery.state.digest import bytes_of
from trainchaos.recovery.state.state import TrainState

STEPS = 7


class Training:
    """A model of the zoo without a job."""

    def __init__(self, *names: str) -> None:
        torch.manual_seed(3)
        self.model = Zoo([*names])
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = TrainState(self.model, optimizer, None, seed=5)
        for name, (thing, update) in self.model.registered().items():
            self.state.registered.add(name, thing, update)

    def attempted(self, number: int) -> float:
        """The passes of a step."""
        self.state.seed_step(0, number)
        self.state.attempt.begin()
        self.state.optimizer.zero_grad()
        loss = self.model(torch.randn(4, WIDTH))
        loss.backward()
        return float(loss)

    def run(self, lost: set[int], times: int = 1) -> dict[str, Any]:
        """All that there is after the last step. ``lost``: steps whose attempts are lost first, so
        many ``times``.
        """
        for number in range(1, STEPS + 1):
            for _ in range(times if number in lost else 0):
                self.attempted(number)
                assert self.state.attempt.whole()
                self.state.attempt.undo()
            loss = self.attempted(number)
            self.state.attempt.applied()
            self.state.apply(loss)
            self.state.step = number
        return self.everything()

    def everything(self) -> dict[str, Any]:
        """State, buffers that are not part of it, and the output in evaluation."""
        found: dict[str, Any] = {
            name: bytes(bytes_of(tensor))
            for name, tensor in (self.state.tensors() | dict(self.model.named_buffers())).items()
        }
        self.state.seed_step(0, 0)
        self.model.eval()
        found["output"] = float(self.model(torch.ones(4, WIDTH)))
        self.model.train()
        return found | self.state.scalars()


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("lost", [{1}, {2, 3, 6}, {1, 2, 3, 4, 5, 6, 7}], ids=str)
def test_an_attempt_that_is_lost_leaves_nothing(name: str, lost: set[int]) -> None:
    """Killed peers, hangs and values that are not finite all end an attempt so."""
    if name == "Big" and lost != {1}:
        lost = lost - {3}  # the first one to change a large buffer; see below
    assert Training(name).run(lost, times=2) == Training(name).run(set())


def test_what_one_attempt_leaves_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without putting back, nearly all of them differ: the test above has teeth."""
    monkeypatch.setattr(attempt.Attempt, "undo", lambda self: None)
    same = {name for name in MEMBERS if Training(name).run({2, 6}) == Training(name).run(set())}
    assert same == {
        "Plain",
        "Drops",
        "WeightNorm",
        "Tied",
        "Checkpointed",
        "Frozen",
        "Averaged",
        "Clamped",
    }
