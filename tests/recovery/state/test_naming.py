"""What of a model is state: its own tensors, whatever ``state_dict()`` makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainchaos.recovery.state.naming import named_parameters, named_tensors
from trainchaos.recovery.state.state import TrainState


class Fused(nn.Module):
    """Saves its weight as two, as torchtitan's fused projection does."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(4, 2))
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(module: nn.Module, found: dict[str, Any], prefix: str, *_: object) -> None:
        both = found.pop(f"{prefix}both")
        found[f"{prefix}q"], found[f"{prefix}k"] = both[:2].clone(), both[2:].clone()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.both.t()


class Told(nn.Linear):
    """Has state that is no tensor of its own."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def state_of(model: nn.Module) -> TrainState:
    return TrainState(model, torch.optim.AdamW(model.parameters()), None, seed=1)


def fused(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Fused(), nn.Linear(4, 1))


def test_what_a_hook_of_state_dict_splits_is_copied_as_it_is() -> None:
    source, target = state_of(fused(1)), state_of(fused(2))
    with torch.no_grad():
        for mine, other in zip(target.tensors().values(), source.tensors().values(), strict=True):
            mine.copy_(other)
    assert torch.equal(source.model[0].both, target.model[0].both)  # type: ignore[index,union-attr]
    x = torch.ones(1, 2)
    assert torch.equal(source.model(x), target.model(x))


def test_what_a_hook_of_state_dict_splits_is_looked_at() -> None:
    state = state_of(fused(1))
    before = state.digests()["parameters"]
    with torch.no_grad():
        state.model[0].both[0, 0] = float("nan")  # type: ignore[index,union-attr]
    assert state.digests()["parameters"] != before
    assert state.not_finite() == "model.0.both"
    assert state.besides() == {}


def test_a_checkpointed_block_has_the_names_of_the_block() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = list(plain.state_dict())
    wrapped = nn.Sequential(*(checkpoint_wrapper(module) for module in plain))
    assert list(named_tensors(wrapped)) == names
    assert list(named_parameters(wrapped)) == [name for name, _ in plain.named_parameters()]
    state = state_of(wrapped)
    assert state.learned(state.tensors()) == [f"model.{name}" for name in state.trained]


def test_names_and_order_are_those_of_state_dict() -> None:
    inner = nn.Linear(3, 3)
    model = nn.Sequential(inner, nn.BatchNorm1d(3), nn.Sequential(inner, nn.Linear(3, 3)))
    model[2][1].weight = inner.weight  # type: ignore[index,union-attr]
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("made", torch.ones(1), persistent=False)
    model.register_buffer("none", None)
    found = named_tensors(model)
    wanted = model.state_dict(keep_vars=True)
    assert list(found) == list(wanted)
    assert all(found[name].data_ptr() == wanted[name].data_ptr() for name in wanted)
    assert not any(tensor.requires_grad for tensor in found.values())


def test_state_that_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^1 \(Told\) keeps state of its own.*job.register"):
        state_of(nn.Sequential(nn.Linear(2, 2), Told(2, 2)))
