"""What of a model is state, and its names: parameters and persistent buffers, named as in the model
as it was built.

A model's ``state_dict()`` may return something else: hooks of it split, merge or convert tensors,
and what is loaded into their copies would be lost.
"""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn

_CHECKPOINTED = "_checkpoint_wrapped_module."
"""What torch's ``checkpoint_wrapper`` adds to the names of what it wraps."""


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each once."""
    return {_plain(name): parameter for name, parameter in model.named_parameters()}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, under each of their names, in the order of
    ``state_dict()``. A sharded model is put back into its parts first, as ``state_dict()`` does.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for hook in module._state_dict_pre_hooks.values():
            hook(module, prefix, True)
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                found[_plain(prefix + name)] = tensor.detach()
    return found


def require_tensors_only(model: nn.Module) -> None:
    """Raise TypeError where a module keeps state that is neither parameter nor buffer."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise TypeError(
                f"{path or 'the model'} ({type(module).__name__}) keeps state of its own"
                " (get_extra_state), which would be lost with its rank: keep it in a buffer, or"
                " give an object that has it to job.register"
            )


def _plain(name: str) -> str:
    return name.replace(_CHECKPOINTED, "")
