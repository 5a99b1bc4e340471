"""A fault's access to a rank's tensors: stored ones by name, passing ones by hooks, and the random
seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainchaos.recovery.rank.job import Job
from trainchaos.recovery.state.digest import bytes_of
from trainchaos.recovery.state.parts import local

Say = Callable[[Mapping[str, Any]], None]


class TensorShim:
    """``say`` logs the measured effect."""

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
        # Only what the optimizer trains: during a pass a sharded model exposes its gathered
        # parameters.
        trained = state.trained
        if surface == "parameter":
            parts = {name: local(parameter.data) for name, parameter in trained.items()}
            return {name: part for name, part in parts.items() if part.numel()}
        if surface == "gradient":
            # Bypasses torch's change tracking, as failing memory would.
            parts = {name: local(p.grad).data for name, p in trained.items() if p.grad is not None}
            return {name: part for name, part in parts.items() if part.numel()}
        raise KeyError(surface)

    def digest(self, surface: str | None) -> str | None:
        """Digest of all tensors of a surface; None if it is not a stored one."""
        if surface not in ("parameter", "gradient", "optimizer_state"):
            return None
        return digest(list(self.stored(surface).values()))

    def change_forward(
        self, surface: str, change: Callable[[Any], None], seed: int, say: Say
    ) -> None:
        """Change an input of the model, or the output of one module, once."""
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
        """Change the seed of the step's random numbers."""
        before = torch.initial_seed()
        after = change(before)
        torch.manual_seed(after)
        random.seed(after)
        numpy.random.seed(after & 0xFFFFFFFF)
        say({"before": f"{before:x}", "after": f"{after:x}"})

    def shift_samples(self, by: int, say: Say) -> None:
        """Make the rank load samples other than those assigned to it."""
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
    """The same for sample ids."""
    return hashlib.sha256(repr(list(samples)).encode()).hexdigest()[:16]
