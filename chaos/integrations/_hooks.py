"""Points in a module's forward and backward pass, by hooks of PyTorch on the module and its
parameters. Nothing of torch is imported: the module brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainchaos import beacon
from trainchaos.chaos.integrations._report import StepReport

PASSES = ("forward", "backward", "gradient")
OnOutput = Callable[[Any, Mapping[str, Any], Any], None]
"""(arguments, keyword arguments, output) of a forward pass in training."""


class ModuleHooks:
    """The points ``names`` of a module while it trains; hooks for them are there only if the
    scenario declares points. ``on_output``: called after each forward pass in training.

    The first gradient of a step asks at ``gradient``: a hook of a parameter runs before
    DistributedDataParallel reduces it. The gradients that follow are NaN if the answer says so.
    ``early`` False: only ``fill`` asks.
    """

    def __init__(
        self,
        module: Any,
        report: StepReport,
        *,
        names: Sequence[str] = PASSES,
        on_output: OnOutput | None = None,
        early: bool = True,
    ) -> None:
        self._report = report
        self._module = module
        self._names = names if report.pointed else ()
        self._on_output = on_output
        self._asked = -1  # the step whose gradients were asked for
        self._nan = False
        self._handles: list[Any] = []
        if "forward" in self._names:
            self._handles.append(module.register_forward_pre_hook(self._before))
        if "backward" in self._names or on_output is not None:
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        if "gradient" in self._names and early:
            self._handles += [
                each.register_hook(self._at_gradient)
                for each in module.parameters()
                if each.requires_grad
            ]

    def fill(self) -> None:
        """Ask at ``gradient`` after the backward pass where no hook of a parameter ran, as in a
        sharded model, and fill what gradients there are.
        """
        if "gradient" not in self._names or self._asked == self._report.done:
            return
        self._ask()
        if not self._nan:
            return
        gradients = [each.grad for each in self._module.parameters() if each.grad is not None]
        before = _sum(gradients[0]) if gradients else None
        for each in gradients:
            _own(each).fill_(float("nan"))
        if gradients:
            self._confirm(before, _sum(gradients[0]))

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, module: Any, _: Any) -> None:
        if module.training:
            self._report.point("forward")

    def _after(self, module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if not module.training:
            return
        if self._on_output is not None:
            self._on_output(args, kwargs, output)
        if "backward" in self._names:
            tensor = next(_differentiable(output), None)
            if tensor is not None:
                tensor.register_hook(self._at_backward)

    def _at_backward(self, _: Any) -> None:
        self._report.point("backward")

    def _at_gradient(self, gradient: Any) -> Any:
        first = self._asked != self._report.done
        if first:
            self._ask()
        if not self._nan:
            return None
        bad = gradient.new_full(gradient.shape, float("nan"))
        if first:
            self._confirm(_sum(gradient), _sum(bad))
        return bad

    def _ask(self) -> None:
        self._asked, self._nan = self._report.done, False
        self._nan = self._report.point("gradient") == "nan"

    def _confirm(self, before: float | None, after: float) -> None:
        beacon.did("nan", self._report.done + 1, before=before, after=after)


def _differentiable(output: Any) -> Iterator[Any]:
    """Tensors of a model's output through which a gradient flows back, the loss first."""
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        for each in output:
            yield from _differentiable(each)
    elif getattr(output, "requires_grad", False):
        yield output


def _own(gradient: Any) -> Any:
    """This rank's part of a gradient: a sum over all parts would be a collective."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _sum(gradient: Any) -> float:
    return float(_own(gradient).sum())
