"""The bytes of tensors on the host, to be sent. Those of a GPU are copied beside the training: into
pinned memory, on a stream of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from trainchaos.recovery.state.digest import bytes_of, own_memory
from trainchaos.recovery.state.strides import quiet

COPY_S = 60.0
"""Within which the GPU must finish its earlier work and the copy."""
LOOK_S = 0.0001


class Fence:
    """The end of a copy from a GPU."""

    def __init__(self, copied: torch.cuda.Event) -> None:
        self._copied = copied

    def hold_writers(self) -> None:
        """What the calling thread gives its GPU from now on begins once the bytes are copied: it
        may write to the tensors. Nobody waits on the host.
        """
        torch.cuda.current_stream().wait_event(self._copied)

    def wait(self, limit_s: float, check: Callable[[], None]) -> None:
        until_s = time.monotonic() + limit_s
        while not self._copied.query():
            check()
            if time.monotonic() > until_s:
                raise RuntimeError(f"a GPU has not copied to the host within {limit_s:g} s")
            time.sleep(LOOK_S)


class HostCopy:
    """A copy of tensors as they are once the caller's stream has done what it was given; the
    training thread makes it. ``apart``: tensors of the host are copied too; else their memory is
    used where it is in order.

    ``views``: the bytes of each tensor, there once ``wait`` has returned; ``fence``: the end of the
    copy from a GPU, None where there is none.
    """

    def __init__(self, tensors: Sequence[Tensor], *, apart: bool) -> None:
        self.views: list[memoryview] = []
        self.fence: Fence | None = None
        on_gpu = [tensor.detach() for tensor in tensors if tensor.is_cuda and tensor.numel()]
        begun = iter(self._begin(on_gpu) if on_gpu else ())
        for tensor in tensors:
            if tensor.is_cuda and tensor.numel():
                self.views.append(next(begun))
            else:
                raw = bytes_of(tensor)
                self.views.append(memoryview(bytearray(raw)) if apart else raw)

    def wait(self, limit_s: float, check: Callable[[], None] = quiet) -> None:
        """Until the bytes are there. On any thread. ``check`` raises what ends the wait. Raises
        RuntimeError if the GPU does not come to it.
        """
        if self.fence is not None:
            self.fence.wait(limit_s, check)

    def hold_writers(self) -> None:
        if self.fence is not None:
            self.fence.hold_writers()

    def _begin(self, tensors: Sequence[Tensor]) -> list[memoryview]:
        device = tensors[0].device
        beside = _beside(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        views = []
        with torch.cuda.stream(beside):
            for tensor in tensors:
                # torch keeps both from being used for something else before the copy is made
                tensor.record_stream(beside)
                pinned = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
                into = pinned.view(tensor.dtype).view(tensor.shape)
                into.copy_(tensor, non_blocking=True)
                views.append(memoryview(pinned.numpy().data))
        copied = torch.cuda.Event()
        copied.record(beside)
        self.fence = Fence(copied)
        return views


class Landing:
    """Puts the bytes that are received for tensors where they belong: at once into the tensor's own
    memory, or through one piece of the host's, pinned for those of a GPU.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._pinned = False

    def of(self, tensor: Tensor) -> memoryview:
        """Where to receive the bytes of ``tensor``; ``landed`` is to be called before the next."""
        own = own_memory(tensor)
        if own is not None:
            return own
        memory, pinned = self._memory, tensor.is_cuda
        if memory is None or memory.nbytes < tensor.nbytes or pinned > self._pinned:
            size = max(tensor.nbytes, 1)
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self._memory, self._pinned = memory, pinned
        return memoryview(memory.numpy().data)[: tensor.nbytes]

    def landed(self, tensor: Tensor) -> None:
        """The bytes of ``tensor`` are all there."""
        if own_memory(tensor) is None and self._memory is not None:
            flat = self._memory[: tensor.nbytes]
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
