"""GPUs and NCCL as far as a rank can tell, without either: a call that ProcessGroupNCCL refuses is refused here.

``Gpus`` is a machine with GPUs whose memory is ordinary memory that is marked. A thread that is ``on`` one sees marked
tensors with ``device`` cuda, cannot mix them with others, and is counted when it waits for the device. ``Nccl`` keeps
the contract of ``torch.distributed.ProcessGroupNCCL``, read from its source, over gloo:

- tensors on the CPU, or not contiguous, raise ValueError;
- the communicator is made by the first operation, which waits in the host for all members and cannot be aborted before
  it is registered; an abort of what is not registered does nothing;
- an operation only enters the stream of its device, and its tensors are not to be used before ``Work.wait``;
- ``Work.wait`` has the stream wait and not the host; an abort ends operations without an error, and leaves garbage;
- a member that is gone does not end an operation; the communicator's error does, for whoever asks for it;
- the watchdog ends the process then, unless the environment says otherwise.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

LIMIT_S = 20.0
GARBAGE = -1e30
READS = frozenset(
    ["item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__format__", "__repr__"]
)
HOUSEKEEPING = frozenset(
    ["untyped_storage", "data_ptr", "__set__", "requires_grad_", "_has_compatible_shallow_copy_type"]
)
WATCHED = frozenset({"", "1", "3"})  # values of TORCH_NCCL_ASYNC_ERROR_HANDLING by which the process is ended


class Gpus:
    """The machine. ``waits``: times that a thread waited for its device, by thread; ``ended``: processes that a
    watchdog would have ended; ``groups``: all of ``Nccl``."""

    def __init__(self) -> None:
        self.waits: dict[int, int] = {}
        self.ended: list[str] = []
        self.groups: list[Nccl] = []
        self._lock = threading.Lock()
        self._marked: dict[
            int, tuple[Any, int]
        ] = {}  # storage -> itself, so that its address is not used again; GPU
        self._flying: dict[int, Work] = {}  # storage -> the operation that uses it
        self._streams: dict[int, list[Work]] = {}  # GPU -> operations that its stream waits for
        self._given: dict[tuple[int, int], int] = {}  # thread and GPU -> pieces of work given to it
        self._known: dict[tuple[int, int], int] = {}  # and known to be done
        self._current = threading.local()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have this thread see the GPUs."""
        with _Mode(self):
            yield

    def waited(self) -> int:
        """How often this thread has waited for a device."""
        return self.waits.get(threading.get_ident(), 0)

    def gpu_of(self, tensor: Tensor) -> int | None:
        """Where a tensor is; None: on the CPU."""
        with torch._C.DisableTorchFunction():
            found = (
                self._marked.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
            )
        return None if found is None else found[1]

    def mark(self, tensor: Tensor, gpu: int) -> Tensor:
        """Put a tensor's memory on a GPU."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        with self._lock:
            self._marked.setdefault(storage._cdata, (storage, gpu))
        return tensor

    def fly(self, work: Work) -> None:
        """An operation was begun."""
        with torch._C.DisableTorchFunction(), self._lock:
            for tensor in work.tensors:
                self._flying[tensor.untyped_storage()._cdata] = work

    def order(self, work: Work) -> None:
        """The current stream of the operation's GPU waits for it."""
        with self._lock:
            self._streams.setdefault(work.gpu, []).append(work)

    def pending(self, gpu: int) -> list[Work]:
        """What the stream of a GPU still waits for."""
        with self._lock:
            left = self._streams[gpu] = [work for work in self._streams.get(gpu, []) if not work.over()]
            return list(left)

    def give(self, gpu: int) -> None:
        """This thread gives the GPU something to do."""
        key = threading.get_ident(), gpu
        self._given[key] = self._given.get(key, 0) + 1

    def given(self, gpu: int) -> int:
        """How much it gave it."""
        return self._given.get((threading.get_ident(), gpu), 0)

    def await_(self, gpu: int, given: int) -> None:
        """This thread waits until that much is done; that counts, if it was not known already."""
        key = threading.get_ident(), gpu
        if given > self._known.get(key, 0):
            self._known[key] = given
            self.waits[key[0]] = self.waited() + 1

    def drain(self, gpu: int) -> None:
        """The host waits for a GPU."""
        self.await_(gpu, self.given(gpu))
        for work in self.pending(gpu):
            work.run_out()

    def use(self, tensor: Tensor) -> None:
        """The stream comes to something that uses a tensor."""
        with torch._C.DisableTorchFunction():
            work = self._flying.get(tensor.untyped_storage()._cdata)
        if work is not None:
            assert work.waited, f"a tensor is used while {work.name} is under way, without Work.wait before"
            work.run_out()
            with torch._C.DisableTorchFunction(), self._lock:
                self._flying.pop(tensor.untyped_storage()._cdata, None)

    def current(self) -> int:
        """The current device of this thread, which begins on GPU 0."""
        return int(getattr(self._current, "gpu", 0))

    def set_device(self, device: Any) -> None:
        """As torch.cuda's."""
        self._current.gpu = torch.device(device).index or 0

    def index(self, device: Any) -> int:
        """Of a device as it is given to torch.cuda's functions."""
        if device is None:
            return self.current()
        found = torch.device(device).index
        return self.current() if found is None else found

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In place of torch's."""

        def synchronize(device: Any = None) -> None:
            assert device is not None, "torch.cuda.synchronize() without saying which GPU"
            self.drain(self.index(device))

        for name, value in {
            "set_device": self.set_device, "current_device": self.current, "synchronize": synchronize,
            "current_stream": lambda device=None: Stream(self, self.index(device)), "Event": lambda: Event(self),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

        class Bound(Nccl):
            gpus = self

        monkeypatch.setattr(dist, "ProcessGroupNCCL", Bound, raising=False)


class Stream:
    """Of a GPU."""

    def __init__(self, gpus: Gpus, gpu: int) -> None:
        self.gpus, self.gpu = gpus, gpu

    def synchronize(self) -> None:
        """Wait for it."""
        self.gpus.drain(self.gpu)


class Event:
    """A place in a stream."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._before: list[Work] = []

    def record(self, stream: Stream) -> None:
        """Here."""
        self._before = self._gpus.pending(stream.gpu)
        self._gpu, self._given = stream.gpu, self._gpus.given(stream.gpu)

    def query(self) -> bool:
        """Whether the stream has come there."""
        over = all(work.over() for work in self._before)
        if over:
            self._gpus.await_(self._gpu, self._given)
        return over


class _Mode(TorchFunctionMode):
    """What a thread that sees the GPUs does with tensors."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        places = [self._gpus.gpu_of(tensor) for tensor in tensors]
        if name == "__get__":
            return self._attribute(func, args, places)
        if name == "backward":
            loss, one = args[:1], (torch.ones_like(args[0]),)
            with self:  # hooks are called in it
                return _engine_run_backward(
                    loss, one, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        gpu = next((place for place in places if place is not None), None)
        if gpu is not None and name not in HOUSEKEEPING:
            self._check(name, tensors, places)
            if name not in READS:
                self._gpus.give(gpu)
        if gpu is not None and name in READS:
            self._gpus.drain(gpu)
        if name in ("to", "cpu", "cuda"):
            return self._moved(func, name, args, given, gpu)
        if name == "copy_" and places[0] is None and gpu is not None:
            self._gpus.drain(gpu)
            return func(*args, **given)
        wanted = given.get("device")
        if wanted is not None:
            gpu = torch.device(wanted).index if torch.device(wanted).type == "cuda" else None
            given["device"] = "cpu"
        made = func(*args, **given)
        if gpu is not None:
            tree_map_only(Tensor, lambda tensor: self._gpus.mark(tensor, gpu), made)
        return made

    def _attribute(self, func: Any, args: tuple[Any, ...], places: list[int | None]) -> Any:
        what, gpu = getattr(func.__self__, "__name__", ""), places[0] if places else None
        if gpu is None:
            return func(*args)
        if what == "device":
            return torch.device("cuda", gpu)
        if what in ("is_cuda", "is_cpu"):
            return what == "is_cuda"
        found = func(*args)
        return self._gpus.mark(found, gpu) if isinstance(found, Tensor) else found

    def _check(self, name: str, tensors: list[Tensor], places: list[int | None]) -> None:
        strangers = {
            place for tensor, place in zip(tensors, places, strict=True) if place is not None or tensor.dim()
        }
        if len(strangers) > 1 and name != "copy_":
            raise RuntimeError(
                f"Expected all tensors to be on the same device, and {name} was given {strangers}"
            )
        for tensor, place in zip(tensors, places, strict=True):
            if place is not None:
                self._gpus.use(tensor)

    def _moved(
        self, func: Any, name: str, args: tuple[Any, ...], given: dict[str, Any], gpu: int | None
    ) -> Any:
        rest, place = list(args), given.get("device")
        for at, value in enumerate(args[1:], start=1):
            if isinstance(value, str | torch.device):
                place, rest[at] = value, "cpu"
        if "device" in given:
            given["device"] = "cpu"
        if name != "to":
            place = name
        if place is None:  # another type, where it is
            made = func(*rest, **given)
            return made if gpu is None else self._gpus.mark(made, gpu)
        target = self._gpus.index(place) if torch.device(place).type == "cuda" else None
        if gpu is not None and target is None:
            self._gpus.drain(gpu)
        made = func(*rest, **given) if name == "to" else args[0]
        if target != gpu:
            made = made.clone()
        return made if target is None else self._gpus.mark(made, target)


class Work:
    """An operation on the stream of NCCL."""

    def __init__(
        self,
        group: Nccl,
        name: str,
        made: dist.Work,
        tensors: list[Tensor],
        gpu: int,
        then: Callable[[], None],
    ) -> None:
        self.name, self.tensors, self.gpu = name, tensors, gpu
        self._then = then
        self._done = False
        self.waited = False
        self._group = group
        self._made = made
        self._spoilt = False
        self._pause = threading.Event()

    def over(self) -> bool:
        """Whether the kernel has ended: done, or aborted with whatever it leaves. That a peer is gone ends it not."""
        if not self._done and self._made.is_completed():
            try:
                self._made.wait(timedelta(milliseconds=1))
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    self._then()
                self._done = True
            except RuntimeError:
                pass
        if self._done:
            return True
        if self._group.aborted and not self._spoilt:
            self._spoilt = True
            with torch._C.DisableTorchFunction(), torch.no_grad():
                for tensor in self.tensors:
                    tensor.data.fill_(GARBAGE if tensor.is_floating_point() else 77)
        return self._spoilt

    def run_out(self) -> None:
        """Wait until the kernel has ended, as the stream does; or until nobody is to count on it any more, as what
        follows in a stream does not hold up the host."""
        deadline_s = time.monotonic() + LIMIT_S
        while not self.over() and not self._group.error:
            assert time.monotonic() < deadline_s, (
                f"the host waits for {self.name} for ever, and no order reaches it"
            )
            self._pause.wait(0.0002)

    def is_completed(self) -> bool:
        """As torch's: also when its communicator has failed."""
        return bool(self._group.error) or self.over()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the stream wait. Raises what its communicator has failed with."""
        assert timeout is None, (
            "a wait with a time limit blocks the host, and aborts the communicator when it is up"
        )
        self.waited = True
        self._group.gpus.order(self)
        if self._group.error:
            self._group.abort()
            raise dist.DistBackendError(self._group.error)
        return True

    def synchronize(self) -> None:
        """Have the stream wait."""
        self.waited = True
        self._group.gpus.order(self)


class Nccl:
    """See the module."""

    gpus: Gpus

    class Options:
        """As torch's."""

        def __init__(self) -> None:
            self._timeout = timedelta(minutes=10)
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        self.rank, self.size = rank, size
        self.aborted, self.error = False, ""
        self.entered = threading.Event()  # it waits for the others
        self._store = store
        self._options = options
        self._made: Any = None
        self._handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")
        self.gpus.groups.append(self)

    def fail(self, message: str) -> None:
        """The communicator notices that something is wrong, as for a peer that has gone."""
        self.error = message
        if self._handling in WATCHED:
            self.gpus.ended.append(message)

    def abort(self) -> None:
        """Of what is registered."""
        if self._made is not None:
            self.aborted = True

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        """As torch's."""
        return self._begin(
            "allreduce", tensors, lambda m: m.allreduce(tensors, *([options] if options is not None else []))
        )

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        """As torch's."""
        return self._begin("broadcast", tensors, lambda m: m.broadcast(tensors, options))

    def alltoall_base(
        self, output: Tensor, given: Tensor, coming: Any, going: Any, options: Any = None
    ) -> Work:
        """As torch's."""
        return self._begin(
            "alltoall", [output, given], lambda m: m.alltoall_base(output, given, coming, going)
        )

    def _allgather_base(self, output: Tensor, part: Tensor) -> Work:
        return self._begin("allgather", [output, part], lambda m: m._allgather_base(output, part))

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor) -> Work:
        parts = torch.empty(whole.numel(), dtype=whole.dtype)  # gloo's own is another thing
        return self._begin(
            "reduce_scatter", [output, whole], lambda m: m.alltoall_base(parts, whole, [], []),
            then=lambda: output.copy_(parts.view(self.size, -1).sum(dim=0)),
        )  # fmt: skip

    def _begin(
        self, name: str, tensors: list[Tensor], operation: Callable[[Any], dist.Work],
        then: Callable[[], Any] = lambda: None,
    ) -> Work:  # fmt: skip
        gpus = {self.gpus.gpu_of(tensor) for tensor in tensors}
        if None in gpus:
            raise ValueError("Tensors must be CUDA and dense")
        with torch._C.DisableTorchFunction():
            if not all(tensor.is_contiguous() for tensor in tensors):
                raise ValueError("Tensors must be contiguous")
        assert len(gpus) == 1, "tensors of several GPUs in one operation"
        if self._made is None:
            self._connect()
        if self.aborted:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank}.")
        for tensor in tensors:
            self.gpus.use(tensor)
        with torch._C.DisableTorchFunction():
            work = Work(self, name, operation(self._made), tensors, gpus.pop() or 0, then)
        self.gpus.fly(work)
        return work

    def _connect(self) -> None:
        """In the host, until all members are there; gloo begins only then, as it does not bear to lose a socket."""
        self.entered.set()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._options._timeout
        try:
            self._store.set(f"here-{self.rank}", "")
            self._store.wait([f"here-{rank}" for rank in range(self.size)], self._options._timeout)
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            self._made = dist.ProcessGroupGloo(self._store, self.rank, self.size, options)
        except RuntimeError as error:
            raise dist.DistBackendError(f"NCCL error: {error}") from error
