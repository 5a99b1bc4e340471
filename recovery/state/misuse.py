"""Detects what a training loop must leave to its job, before the ranks diverge, and takes over what
a loop with DistributedDataParallel may leave as it is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

# ``in_step``: the thread is in a step's block; ``applying``: and in its commit; ``backward``: what
# loss.backward() means there, if it has a meaning
_HERE = threading.local()
_GUARDS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


@contextmanager
def in_step(backward: Callable[[Tensor], None] | None = None) -> Iterator[None]:
    """The block of a step. ``backward``: called for ``loss.backward()``, see ``serve_backward``."""
    _HERE.in_step, _HERE.backward = True, backward
    try:
        yield
    finally:
        _HERE.in_step, _HERE.backward = False, None


@contextmanager
def applying() -> Iterator[None]:
    """The part of it in which the job itself uses optimizer and scheduler."""
    _HERE.applying = True
    try:
        yield
    finally:
        _HERE.applying = False


def _by_the_loop() -> bool:
    return getattr(_HERE, "in_step", False) and not getattr(_HERE, "applying", False)


def guard_optimizer(optimizer: Optimizer) -> None:
    """From now on a step of this optimizer by the training loop itself raises RuntimeError: the
    gradients may be this rank's own, and a step that is redone would be applied twice.
    """
    if (old := _GUARDS.pop(optimizer, None)) is not None:
        old.remove()

    def before(*_: object) -> None:
        if _by_the_loop():
            raise RuntimeError(
                "optimizer.step() was called in the loop: step.commit() makes the optimizer's step"
            )

    _GUARDS[optimizer] = optimizer.register_step_pre_hook(before)


def guard_scaling() -> None:
    """From now on a loss that a loop scales raises RuntimeError: its gradients would not be divided
    by the scale again, and an overflow, which a scaler skips, would count as a fault. Detected by
    torch's own class, since a scaled loss looks like any other.
    """
    scale = torch.amp.GradScaler.scale
    if hasattr(scale, "__wrapped__"):
        return

    @functools.wraps(scale)
    def guarded(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if self.is_enabled() and _by_the_loop():
            raise RuntimeError(
                "GradScaler scales the loss in a step: the job takes non-finite gradients for a"
                " fault and does not unscale; use torch.autocast with bfloat16, which needs no"
                " scaler, or GradScaler(enabled=False)"
            )
        return scale(self, outputs)

    scaler: Any = torch.amp.GradScaler
    scaler.scale = guarded


def serve_backward() -> None:
    """From now on ``loss.backward()``, without arguments, is the step's own in the block of a step
    that says so.
    """
    original: Any = torch.Tensor.backward
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        of_step = getattr(_HERE, "backward", None)
        if of_step is None or args or kwargs:
            original(self, *args, **kwargs)
        else:
            of_step(self)

    tensor: Any = torch.Tensor
    tensor.backward = backward


def backward_as_torch_does(loss: Tensor) -> None:
    """``loss.backward()`` by the step itself."""
    of_step, _HERE.backward = getattr(_HERE, "backward", None), None
    try:
        loss.backward()
    finally:
        _HERE.backward = of_step
