"""GPUs and NCCL as far as a rank can tell, without either: a call that ProcessGroupNCCL refuses is
refused here.

``Gpus`` is a machine with GPUs whose memory is ordinary memory that is marked. A thread that is
``on`` one sees marked tensors with ``device`` cuda, cannot mix them with others, and is counted
when it waits for the device; so is a thread that it starts. Two things are refused that CUDA itself
lets pass, and that show as memory and contexts on the wrong GPU or as garbage:

- a thread works on its current GPU alone: it begins on GPU 0 like every thread, whatever the one
  that started it had set, and what does not name a GPU goes there. Guards of torch mend some of it,
  and nobody should have to know which;
- a copy to pinned memory that does not block arrives when the host has waited for it, and is
  garbage before.

``Nccl`` keeps the contract of ``torch.distributed.ProcessGroupNCCL``, read from its source, over
gloo:

- tensors on the CPU, or not contiguous, raise ValueError;
- the communicator is made by the first operation, which waits in the host for all members and
  cannot be aborted before it is registered; an abort of what is not registered does nothing;
- an operation only enters a stream of its own, and its tensors are not to be used before
  ``Work.wait``;
- nor may they be let go of before: the memory would be given to whoever asks next, and be written
  to all the same. Torch holds them itself (2.8 on), or has the allocator do so, as the environment
  says; nothing here counts on it;
- ``Work.wait`` has the stream wait and not the host; an abort ends operations without an error, and
  leaves garbage;
- a member that is gone does not end an operation; the communicator's error does, for whoever asks
  for it;
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.running import LIMIT_S

GARBAGE, GARBAGE_BYTE = -1e30, 77
READS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__float__",
        "__int__",
        "__bool__",
        "__index__",
        "__format__",
        "__repr__",
    ]
)
HOUSEKEEPING = frozenset(
    [
        "untyped_storage",
        "data_ptr",
        "__set__",
        "requires_grad_",
        "_has_compatible_shallow_copy_type",
    ]
)
# values of TORCH_NCCL_ASYNC_ERROR_HANDLING by which the process is ended
WATCHED = frozenset({"", "1", "3"})


class Gpus:
    """The machine. ``waits``: times that a thread waited for its device, by thread; ``ended``:
    processes that a watchdog would have ended; ``groups``: all of ``Nccl``.
    """

    def __init__(self) -> None:
        self.waits: dict[int, int] = {}
        self.ended: list[str] = []
        self.groups: list[Nccl] = []
        self._lock = threading.Lock()
        # storage -> itself, so that its address is not used again and its memory is given back; GPU
        self._marked: dict[int, tuple[StorageWeakRef, int]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._flying: dict[int, Work] = {}  # storage -> the operation that uses it
        # GPU -> operations that nothing is known to come after
        self._unordered: dict[int, list[Work]] = {}
        self._streams: dict[
            int, list[Work | Transit]
        ] = {}  # GPU -> operations and copies that its stream waits for
        self._given: dict[tuple[int, int], int] = {}  # thread and GPU -> pieces of work given to it
        self._known: dict[tuple[int, int], int] = {}  # and known to be done
        self._current = threading.local()

    @contextmanager
    def on(self, gpu: int | None = None) -> Iterator[None]:
        """Have this thread see the GPUs. ``gpu``: its current one meanwhile."""
        before, sees = self.current(), self._sees()
        self._current.gpu, self._current.sees = before if gpu is None else gpu, True
        try:
            with _Mode(self):
                yield
        finally:
            self._current.gpu, self._current.sees = before, sees

    def _sees(self) -> bool:
        return bool(getattr(self._current, "sees", False))

    def require(self, gpu: int, what: str) -> None:
        """Fail unless a GPU is the current one of this thread."""
        assert gpu == self.current(), (
            f"{what} on GPU {gpu} by a thread ({threading.current_thread().name}) whose current GPU"
            f" is {self.current()}"
        )

    def waited(self) -> int:
        """How often this thread has waited for a device."""
        return self.waits.get(threading.get_ident(), 0)

    def gpu_of(self, tensor: Tensor) -> int | None:
        """Where a tensor is; None: on the CPU."""
        with torch._C.DisableTorchFunction():
            found = (
                self._marked.get(tensor.untyped_storage()._cdata)
                if tensor.layout == torch.strided
                else None
            )
        return None if found is None else found[1]

    def mark(self, tensor: Tensor, gpu: int) -> Tensor:
        """Put a tensor's memory on a GPU."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        with self._lock:
            self._marked.setdefault(storage._cdata, (StorageWeakRef(storage), gpu))
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        """Page-lock a tensor's memory on the host."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def send(self, target: Tensor, source: Tensor, gpu: int) -> bool:
        """Begin to copy from a GPU to the host; False if it is not pinned there, as such a copy
        blocks.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if target.untyped_storage()._cdata not in self._pinned:
                return False
            transit = Transit(target.data, source.detach().clone())
        with self._lock:
            self._streams.setdefault(gpu, []).append(transit)
        return True

    def fly(self, work: Work) -> None:
        """An operation was begun."""
        with self._lock:
            self._unordered.setdefault(work.gpu, []).append(work)
            for memory in work.memory:
                self._flying[memory.storage.cdata] = work

    def order(self, work: Work) -> None:
        """The current stream of the operation's GPU waits for it."""
        self.inspect(work.gpu)
        work.waited = True
        with self._lock:
            self._streams.setdefault(work.gpu, []).append(work)

    def inspect(self, gpu: int) -> None:
        """Fail if what an operation reads or writes was let go of, and nothing is known to come
        after it.
        """
        with self._lock:
            left = [
                work for work in self._unordered.get(gpu, []) if not work.waited and not work.known
            ]
            self._unordered[gpu] = left
        for work in left:
            assert not any(memory.storage.expired() for memory in work.memory), (
                f"a tensor of {work.name} was let go of while it is under way, without Work.wait"
                " before"
            )

    def pending(self, gpu: int) -> list[Work | Transit]:
        """What the stream of a GPU still waits for."""
        with self._lock:
            left = self._streams[gpu] = [
                work for work in self._streams.get(gpu, []) if not work.over()
            ]
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
        self.inspect(gpu)
        self.await_(gpu, self.given(gpu))
        for work in self.pending(gpu):
            work.run_out()

    def use(self, tensor: Tensor) -> None:
        """The stream comes to something that uses a tensor."""
        with torch._C.DisableTorchFunction():
            work = self._flying.get(tensor.untyped_storage()._cdata)
        if work is not None:
            assert work.waited, (
                f"a tensor is used while {work.name} is under way, without Work.wait before"
            )
            work.run_out()
            with torch._C.DisableTorchFunction(), self._lock:
                self._flying.pop(tensor.untyped_storage()._cdata, None)

    def current(self) -> int:
        """The current device of this thread, which begins on GPU 0."""
        return int(getattr(self._current, "gpu", 0))

    def set_device(self, device: Any) -> None:
        """As torch.cuda's."""
        self._current.gpu = device if isinstance(device, int) else self.index(device)

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
            "set_device": self.set_device,
            "current_device": self.current,
            "synchronize": synchronize,
            "current_stream": lambda device=None: Stream(self, self.index(device)),
            "Event": lambda: Event(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        plain = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self._sees():
                run = thread.run

                def seeing() -> None:
                    with self.on():
                        run()

                thread.run = seeing  # type: ignore[method-assign]
            plain(thread)

        monkeypatch.setattr(threading.Thread, "start", start)

        class Bound(Nccl):
            gpus = self

        monkeypatch.setattr(dist, "ProcessGroupNCCL", Bound, raising=False)


class Stream:
    """Of a GPU."""

    def __init__(self, gpus: Gpus, gpu: int) -> None:
        gpus.require(gpu, "a stream")
        self.gpus, self.gpu = gpus, gpu

    def synchronize(self) -> None:
        """Wait for it."""
        self.gpus.drain(self.gpu)


class Event:
    """A place in a stream."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._before: list[Work | Transit] = []

    def record(self, stream: Stream | None = None) -> None:
        """Here; None: in the stream of the current GPU, whichever that is."""
        gpu = self._gpus.current() if stream is None else stream.gpu
        self._gpus.require(gpu, "an event")
        self._gpus.inspect(gpu)
        self._before = self._gpus.pending(gpu)
        self._gpu, self._given = gpu, self._gpus.given(gpu)

    def query(self) -> bool:
        """Whether the stream has come there."""
        over = all(work.over() for work in self._before if isinstance(work, Work))
        if over:
            self._gpus.await_(self._gpu, self._given)
            for work in self._before:
                work.run_out()
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
            self._gpus.require(gpu, name)
            self._check(name, tensors, places)
            if name not in READS:
                self._gpus.give(gpu)
        if gpu is not None and name in READS:
            self._gpus.drain(gpu)
        if name in ("to", "cpu", "cuda"):
            return self._moved(func, name, args, given, gpu)
        if name == "copy_" and places[0] is None and gpu is not None:
            if given.get("non_blocking") and self._gpus.send(*tensors, gpu):
                return args[0]
            self._gpus.drain(gpu)
            return func(*args, **given)
        wanted = given.get("device")
        if wanted is not None:
            gpu = self._gpus.index(wanted) if torch.device(wanted).type == "cuda" else None
            given["device"] = "cpu"
            if gpu is not None:
                self._gpus.require(gpu, name)
        if given.pop("pin_memory", False):
            return self._gpus.pin(func(*args, **given))
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
            place
            for tensor, place in zip(tensors, places, strict=True)
            if place is not None or tensor.dim()
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
        if target is not None:
            self._gpus.require(target, name)
        if gpu is not None and target is None:
            self._gpus.drain(gpu)
        made = func(*rest, **given) if name == "to" else args[0]
        if target != gpu:
            made = made.clone()
        return made if target is None else self._gpus.mark(made, target)


class Transit:
    """A copy on its way from a GPU to pinned memory of the host."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = target, source
        self._arrived = False
        target.view(torch.uint8).fill_(GARBAGE_BYTE) if target.dim() else target.zero_()

    def over(self) -> bool:
        """Whether the host knows that it has arrived."""
        return self._arrived

    def run_out(self) -> None:
        """The host knows it."""
        if not self._arrived:
            with torch._C.DisableTorchFunction():
                self._target.copy_(self._source)
            self._arrived = True


class _Memory:
    """Where a tensor lies, which does not keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()

    def tensor(self) -> Tensor | None:
        """A tensor there, with versions of its own as NCCL counts none; None: it was let go of."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # type: ignore[no-untyped-call]
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype).set_(
            storage, self._offset, self._size, self._stride
        )


class Work:
    """An operation on the stream of NCCL. ``memory``: of its tensors, which it does not keep;
    ``waited``: the current stream comes after it; ``known``: the host knows that it has ended.

    Gloo works on ``copies``, which come to the memory when they are done. The first of them are
    ``outputs``.
    """

    def __init__(
        self,
        group: Nccl,
        name: str,
        operation: Callable[[list[Tensor]], dist.Work],
        tensors: list[Tensor],
        outputs: int,
        gpu: int,
        then: Callable[[list[Tensor]], object],
    ) -> None:
        self.name, self.gpu = name, gpu
        self.memory = [_Memory(tensor) for tensor in tensors]
        self.waited = self.known = False
        self._copies = [tensor.detach().clone() for tensor in tensors]
        self._outputs, self._then = outputs, then
        self._group = group
        self._made = operation(self._copies)
        self._done = self._spoilt = False
        self._pause = threading.Event()

    def over(self) -> bool:
        """Whether the kernel has ended: done, or aborted with whatever it leaves. That a peer is
        gone ends it not.
        """
        if not self._done and self._made.is_completed():
            try:
                self._made.wait(timedelta(milliseconds=1))
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    self._then(self._copies)
                    for memory, copy in list(zip(self.memory, self._copies, strict=True))[
                        : self._outputs
                    ]:
                        there = memory.tensor()
                        if there is not None:
                            there.copy_(copy)
                self._done = True
            except RuntimeError:
                pass
        if self._done:
            return True
        if self._group.aborted and not self._spoilt:
            self._spoilt = True
            with torch._C.DisableTorchFunction(), torch.no_grad():
                for there in [memory.tensor() for memory in self.memory]:
                    if there is not None:
                        there.fill_(GARBAGE if there.is_floating_point() else GARBAGE_BYTE)
        return self._spoilt

    def run_out(self) -> None:
        """Wait until the kernel has ended, as the stream does; or until nobody is to count on it
        any more, as what follows in a stream does not hold up the host.
        """
        deadline_s = time.monotonic() + LIMIT_S
        while not self.over() and not self._group.error:
            assert time.monotonic() < deadline_s, (
                f"the host waits for {self.name} for ever, and no order reaches it"
            )
            self._pause.wait(0.0002)

    def is_completed(self) -> bool:
        """As torch's: also when its communicator has failed."""
        self._group.gpus.inspect(self.gpu)
        over = self.over()
        self.known = self.known or over
        return bool(self._group.error) or over

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the stream wait. Raises what its communicator has failed with."""
        assert timeout is None, (
            "a wait with a time limit blocks the host, and aborts the communicator when it is up"
        )
        self.synchronize()
        if self._group.error:
            self._group.abort()
            raise dist.DistBackendError(self._group.error)
        return True

    def synchronize(self) -> None:
        """Have the stream wait."""
        self._group.gpus.require(self.gpu, f"a wait for {self.name}")
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
        more = [options] if options is not None else []
        return self._begin("allreduce", tensors, lambda made, copies: made.allreduce(copies, *more))

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        """As torch's."""
        return self._begin(
            "broadcast", tensors, lambda made, copies: made.broadcast(copies, options)
        )

    def alltoall_base(
        self, output: Tensor, given: Tensor, coming: Any, going: Any, options: Any = None
    ) -> Work:
        """As torch's."""
        return self._begin(
            "alltoall",
            [output, given],
            lambda made, copies: made.alltoall_base(*copies, coming, going),
            outputs=1,
        )

    def _allgather_base(self, output: Tensor, part: Tensor) -> Work:
        return self._begin(
            "allgather",
            [output, part],
            lambda made, copies: made._allgather_base(*copies),
            outputs=1,
        )

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor) -> Work:
        with torch._C.DisableTorchFunction():
            parts = torch.empty(whole.numel(), dtype=whole.dtype)  # gloo's own is another thing
        return self._begin(
            "reduce_scatter",
            [output, whole],
            lambda made, copies: made.alltoall_base(parts, copies[1], [], []),
            outputs=1,
            then=lambda copies: copies[0].copy_(parts.view(self.size, -1).sum(dim=0)),
        )

    def _begin(
        self,
        name: str,
        tensors: list[Tensor],
        operation: Callable[[Any, list[Tensor]], dist.Work],
        *,
        outputs: int | None = None,
        then: Callable[[list[Tensor]], object] = lambda copies: None,
    ) -> Work:
        """``outputs``: how many of the tensors it writes, None for all."""
        gpus = {self.gpus.gpu_of(tensor) for tensor in tensors}
        if None in gpus:
            raise ValueError("Tensors must be CUDA and dense")
        with torch._C.DisableTorchFunction():
            if not all(tensor.is_contiguous() for tensor in tensors):
                raise ValueError("Tensors must be contiguous")
        assert len(gpus) == 1, "tensors of several GPUs in one operation"
        gpu = gpus.pop() or 0
        self.gpus.require(gpu, name)
        self.gpus.inspect(gpu)
        if self._made is None:
            self._connect()
        if self.aborted:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank}.")
        for tensor in tensors:
            self.gpus.use(tensor)
        with torch._C.DisableTorchFunction():
            writes = len(tensors) if outputs is None else outputs
            work = Work(
                self, name, lambda copies: operation(self._made, copies), tensors, writes, gpu, then
            )
        self.gpus.fly(work)
        return work

    def _connect(self) -> None:
        """In the host, until all members are there; gloo begins only then, as it does not bear to
        lose a socket.
        """
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
