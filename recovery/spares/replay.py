"""A step that other ranks have applied, as what a spare needs to apply it too: the reduced
gradients, and the parts of the state that do not follow from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainchaos.recovery.collectives.buckets import Buffers
from trainchaos.recovery.state.digest import own_memory
from trainchaos.recovery.state.parts import local, wrapped
from trainchaos.recovery.state.state import TrainState


def names_in(state: TrainState, buffers: Sequence[Buffers]) -> list[list[str]]:
    """The names of the parameters in each of these buffers, in order."""
    names = {id(parameter): name for name, parameter in state.trained.items()}
    return [[names[id(parameter)] for parameter in part.parameters] for part in buffers]


def without_gradient(state: TrainState) -> list[str]:
    """Parameters that this step leaves as they are."""
    return [name for name, parameter in state.trained.items() if parameter.grad is None]


def gradients_of(
    state: TrainState, names: Sequence[Sequence[str]], parts: Sequence[Tensor], none: Sequence[str]
) -> dict[str, Tensor]:
    """Gradients by parameter, of what is held here of each, as views of ``parts``: for each buffer
    its gradients one after the other, in the order of ``names``; ``none``: those that have none.
    Raises ValueError where they are not of this model.
    """
    found: dict[str, Tensor] = {}
    for held, flat in zip(names, parts, strict=True):
        try:
            parameters = [state.trained[name] for name in held]
        except KeyError as error:
            raise ValueError(f"there is no parameter {error} here") from error
        sizes = [local(parameter).numel() for parameter in parameters]
        if sum(sizes) != flat.numel():
            raise ValueError("the gradients are of another model")
        for name, parameter, piece in zip(held, parameters, flat.split(sizes), strict=True):
            found[name] = wrapped(piece.view_as(local(parameter)), parameter)
    return {name: gradient for name, gradient in found.items() if name not in set(none)}


def apply(state: TrainState, gradients: Mapping[str, Tensor], step: int, loss: float) -> None:
    """Apply a step as the ranks have done: the same optimizer with the same gradients."""
    for name, parameter in state.trained.items():
        parameter.grad = gradients.get(name)
    try:
        state.apply(loss)
    finally:
        for parameter in state.trained.values():
            parameter.grad = None
    state.step = step


def put(tensor: Tensor, data: memoryview) -> None:
    """Fill a tensor with the bytes of another of its type and shape. Raises ValueError."""
    if tensor.nbytes != data.nbytes:
        raise ValueError("a tensor of another size")
    own = own_memory(tensor)
    if own is not None:
        own[:] = data
    elif data.nbytes:
        flat = torch.frombuffer(data, dtype=torch.uint8)
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def text_of(state: TrainState) -> str:
    """The rest of the state, as text that is equal for equal state but for the step."""
    return json.dumps(state.scalars())
