"""Hooks by which the job hears that the model, or a part of it, is called."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class CalledHook:
    """A forward pre-hook that calls ``called``. Copies of the module, such as a moving average of
    its parameters, and what is saved of it, do nothing instead: they are not the job's model.
    """

    def __init__(self, called: Callable[..., None]) -> None:
        self._called = called

    def __call__(self, *_: object) -> None:
        self._called()

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _hook_of_a_copy, ()


def nothing(*_: object) -> None:
    """The hook of a copy."""


def _hook_of_a_copy() -> Callable[..., None]:
    return nothing


def hook_parts(model: nn.Module, called: Callable[..., None]) -> list[RemovableHandle]:
    """Have ``called`` called before each part of the model that has parts itself; the model as a
    whole is left out, as are single layers, which end soon, and layers that torch computes in one
    kernel where nothing hooks them.
    """
    hook = CalledHook(called)
    fused = {
        part
        for layer in model.modules()
        if isinstance(layer, nn.TransformerEncoderLayer)
        for part in layer.modules()
    }
    return [
        part.register_forward_pre_hook(hook)
        for part in model.modules()
        if part is not model
        and part not in fused
        and next(part.children(), None) is not None
        and not isinstance(part, torch.jit.ScriptModule)
    ]
