"""The model's hooks: a lost generation ends a forward pass between two parts of the model, and
copies of the model, or what is saved of it, are the script's own.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from trainchaos.recovery.state.called import CalledHook, hook_parts


class Lost(Exception):
    """The generation is."""


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 1))
    )


def test_parts_with_parts_are_hooked_and_neither_the_whole_nor_a_layer() -> None:
    calls, net = list[int](), network()
    hook_parts(net, lambda *_: calls.append(1))
    net(torch.ones(1, 2))
    assert len(calls) == 2


def test_a_pass_ends_at_the_next_part() -> None:
    net, seen = network(), list[str]()
    for number, part in enumerate(net):
        part.register_forward_hook(lambda *_, number=number: seen.append(str(number)))

    def passing(*_: object) -> None:
        if seen:
            raise Lost

    hook_parts(net, passing)
    with pytest.raises(Lost):
        net(torch.ones(1, 2))
    assert seen == ["0"]


def _saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    read: nn.Module = torch.load(file, weights_only=False)
    return read


@pytest.mark.parametrize("how", [copy.deepcopy, AveragedModel, _saved])
def test_copies_call_nobody(how: Callable[[nn.Module], nn.Module]) -> None:
    class Open:
        """Like a job, it cannot be copied."""

        file = io.BufferedReader(io.BytesIO())  # type: ignore[arg-type]
        calls = 0

        def heard(self, *_: object) -> None:
            Open.calls += 1

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot be copied")

        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    job, net = Open(), network()
    net.register_forward_pre_hook(CalledHook(job.heard))
    hook_parts(net, job.heard)
    other = how(net)
    x = torch.ones(1, 2)
    made: Tensor = other(x)
    assert Open.calls == 0
    assert torch.equal(net(x), made)
    assert Open.calls == 3


def test_layers_that_torch_fuses_stay_without_hooks() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8)
    net = nn.Sequential(nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)))
    hook_parts(net, lambda *_: None)
    hooked = {type(part) for part in net.modules() if part._forward_pre_hooks}
    assert hooked == {nn.Sequential, nn.TransformerEncoder, nn.ModuleList}
