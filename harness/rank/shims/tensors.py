"""Tensors of a rank as faults reach them: stored ones by name, passing ones by hooks, the seed of
random numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from recovery.rank.job import Job
from recovery.state.digest import bytes_of
from recovery.state.parts import local

Say = Callable[[Mapping[str, Any]], None]


class TensorShim:
    """``say`` logs what was measured of an effect."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def stored(self, surface: str) -> dict[str, Tensor]:
        """See chaos.fault.targets.RankTarget.tensors. Raises KeyError for a surface that is not
        stored.
        """
        state = self._job.state
        if surface == "optimizer_state":
            found = {n: t for n, t in state.parts().items() if n.startswith("optimizer.")}
            return {name: part for name, part in found.items() if part.numel()}
        # Of what the optimizer trains: in the midst of a pass a sharded model shows what it has
        # gathered.
        trained = state.trained
        if surface == "parameter":
            parts = {name: local(parameter.data) for name, parameter in trained.items()}
            return {name: part for name, part in parts.items() if part.numel()}
        if surface == "gradient":
            # Not through torch's account of changes, as memory that fails does not keep it either.
            parts = {name: local(p.grad).data for name, p in trained.items() if p.grad is not None}
            return {name: part for name, part in parts.items() if part.numel()}
        raise KeyError(surface)

    def digest(self, surface: str | None) -> str | None:
        """Of everything stored on a surface; None where it is none."""
        if surface not in ("parameter", "gradient", "optimizer_state"):
            return None
        return digest(list(self.stored(surface).values()))

    def change_forward(
        self, surface: str, change: Callable[[Any], None], seed: int, say: Say
    ) -> None:
        """Change what goes into the model, or comes out of one module, once."""
        hooks: list[Any] = []

        def once(value: Any) -> Tensor | None:
            if not hooks or not isinstance(value, Tensor) or not value.is_floating_point():
                return None
            while hooks:
                hooks.pop().remove()
            changed = value.clone(memory_format=torch.contiguous_format)
            change(changed.view(-1))
            say({"before": digest([value]), "after": digest([changed])})
            return changed

        def entering(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            changed = once(inputs[0]) if inputs else None
            return None if changed is None else (changed, *inputs[1:])

        model = self._job.state.model
        if surface == "input":
            hooks.extend(module.register_forward_pre_hook(entering) for module in model.modules())
            return
        leaves = [module for module in model.modules() if not list(module.children())]
        chosen = leaves[random.Random(seed).randrange(len(leaves))]
        hooks.append(chosen.register_forward_hook(lambda module, inputs, output: once(output)))

    def change_rng(self, change: Callable[[int], int], say: Say) -> None:
        """Seed the step's random numbers otherwise."""
        before = torch.initial_seed()
        after = change(before)
        torch.manual_seed(after)
        random.seed(after)
        numpy.random.seed(after & 0xFFFFFFFF)
        say({"before": f"{before:x}", "after": f"{after:x}"})

    def shift_samples(self, by: int, say: Say) -> None:
        """Have the rank load other samples than it was given."""
        step, size = self._job.current, self._job.config.samples
        shifted = [(sample + by) % size for sample in step.samples]
        say({"before": digest_of_ids(step.samples), "after": digest_of_ids(shifted)})
        step.samples = shifted


def digest(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of their bytes, 16 hexadecimal digits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bytes_of(tensor))
    return found.hexdigest()[:16]


def digest_of_ids(samples: Sequence[int]) -> str:
    """The same of sample ids."""
    return hashlib.sha256(repr(list(samples)).encode()).hexdigest()[:16]
