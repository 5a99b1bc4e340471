"""A process group that can be left at any moment.

``ProcessGroupGloo.abort`` returns at once but does not unblock a pending collective; shutting down
the group's own TCP sockets does, within milliseconds. NCCL has a working abort, and more in
``recovery.collectives.nccl``. Each generation uses its own key prefix, so nothing of an earlier one
can be read, and a rank stuck in rendezvous is unblocked the same way.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainchaos.recovery.collectives import nccl
from trainchaos.recovery.collectives.dialing import Address, RankNames, RedirectingStore, address_of
from trainchaos.recovery.collectives.lost import DEVICE_ERRORS, GenerationLost, first_line
from trainchaos.recovery.collectives.sockets import shut_down, socket_inodes
from trainchaos.recovery.collectives.storelink import (
    StoreLink,
    connect,
    forget_former,
    socket_to,
)
from trainchaos.recovery.policy.jobconfig import COLLECTIVE_TIMEOUT_S, NetworkAddresses
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.policy.mesh import DIMS, SAME, Mesh, circles_of

POLL = timedelta(milliseconds=20)
LAST_CHANCE_S = 0.02
SEE_OFF_S = 30.0  # how long a set-up that was left behind is pushed to end
SEE_OFF_PAUSE_S = 0.05
ABANDONED_LOOK_S = 1.0  # between looks whether an abandoned operation has ended
GRACE_S = 5.0  # beyond its own timeout: one that outlives that is held for ever
END_S = 5.0  # longest wait for threads that leave groups as the process ends
STARTING_S = 0.001  # between looks at a thread that is being started
LEAVING = "leave-group"  # the threads that take groups down
ABANDONED = "abandoned-group"  # the threads that wait for it
_PEER_LIMIT = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
MOST_BEGUN = 64  # kept, until those that nobody waited for are looked through


class Circle:
    """Some ranks of a generation, and what they do together. ``ranks``: their numbers in the
    generation, in order; ``rank``: this one's.

    Used by the training thread. A circle of one rank has nothing to exchange.
    """

    def __init__(self, group: Group, ranks: Sequence[int], made: Any) -> None:
        self.rank = group.rank
        self.backend = group.backend
        self.device = group.device
        self.ranks: Sequence[int] = tuple(ranks)
        self._group = group
        self._made = made

    def start(self, operation: Callable[[Any], dist.Work]) -> dist.Work:
        """Begin an operation on torch's process group. Its tensors are kept until it is waited for,
        as ``operation`` refers to them. Raises GenerationLost.
        """
        try:
            work = operation(self._made)
        except DEVICE_ERRORS:
            raise
        except RuntimeError as error:
            raise GenerationLost(first_line(error)) from error
        self._group.began(work, operation)
        return work

    def start_all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> dist.Work | None:
        """Begin to sum ``tensor`` over the ranks, in place; None: nothing to wait for. Raises
        GenerationLost.
        """
        if self._made is None or not tensor.numel():
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self.start(lambda made: made.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy ``tensor`` from rank ``source`` to all. Raises GenerationLost."""
        self.wait(self.start_broadcast(tensor, source))
        self.settle()

    def start_broadcast(self, tensor: Tensor, source: int) -> dist.Work | None:
        """Begin to copy ``tensor``; None: nothing to wait for. Raises GenerationLost."""
        if self._made is None:
            return None
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(source)
        return self.start(lambda made: made.broadcast([tensor], options))

    def settle(self) -> None:
        """Wait until what was received is in place and whole. Raises GenerationLost."""
        if self._made is not None:
            self._group.settle()

    def wait(self, work: dist.Work | None) -> None:
        """Have what comes next on this thread come after an operation. Raises GenerationLost when
        it fails or the generation is aborted.
        """
        if work is not None:
            self._group.wait(work)

    def start_with_peer(self, operation: Callable[[Any], dist.Work]) -> Any:
        """Begin an operation with one other rank. Raises GenerationLost."""
        work = self.start(operation)
        gloo = self.backend == "gloo"
        return _PeerWork(work, self._group.begun.waited_for) if gloo else work

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Begin to send a tensor to one rank. Raises GenerationLost."""
        place = self.ranks.index(to)
        return self.start_with_peer(lambda made: made.send([tensor], place, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Begin to fill a tensor with what one rank sends. Raises GenerationLost."""
        place = self.ranks.index(source)
        return self.start_with_peer(lambda made: made.recv([tensor], place, tag))

    def read(self, values: Tensor) -> list[Any]:
        """The numbers of a small tensor; see ``Group.read``."""
        return self._group.read(values)

    def close(self) -> None:
        """Release torch's process group."""
        self._made = None


class _PeerWork:
    """One of gloo's operations with one other rank, waited for on a thread of its own: a wait of
    gloo's that ends by its time limit closes the connection, so that it cannot be looked up from.
    """

    def __init__(self, work: dist.Work, is_over: Callable[[dist.Work], None]) -> None:
        self._work = work
        self._is_over = is_over
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._await, name="await-peer", daemon=True).start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError as torch does, also when the time is up."""
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not yet")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._over.is_set()

    def _await(self) -> None:
        try:
            self._work.wait(_PEER_LIMIT)
        except RuntimeError as error:
            self._error = error
        self._is_over(self._work)
        self._over.set()


class Begun:
    """Operations that were begun, and that nothing comes after yet. ``unfinished`` may be asked on
    any thread.
    """

    def __init__(self) -> None:
        self._works: dict[int, tuple[dist.Work, Any]] = {}

    def add(self, work: dist.Work, uses: Any) -> None:
        """``uses``: what is kept with it."""
        if len(self._works) >= MOST_BEGUN and uses is None:
            kept = list(self._works.items())
            self._works = {number: one for number, one in kept if not one[0].is_completed()}
        self._works[id(work)] = (work, uses)

    def waited_for(self, work: dist.Work) -> None:
        """What comes next comes after it. Called on any thread."""
        self._works.pop(id(work), None)

    def unfinished(self) -> int:
        """How many are not done."""
        return sum(not work.is_completed() for work, _ in list(self._works.values()))

    def take(self) -> list[tuple[dist.Work, Any]]:
        """All of them, with what they use; they are forgotten."""
        works, self._works = self._works, {}
        return [*works.values()]


class Group:
    """The process group of one generation, whose ranks meet in circles: ``everyone``; ``holders``,
    those of the same cell as this one; ``same``, these and all that hold the same parameters; and
    those of this one's replica that stand on a line with it, for each dimension of the mesh.

    ``form``, ``leave`` and the collectives are called by the training thread, ``abort`` by any
    other. ``check`` raises GenerationLost once the generation is aborted. ``timeout_s`` bounds the
    rendezvous, and ``collective_timeout_s`` (None: the same) each collective, which lasts as long
    as its last member does something else; both are a last resort, since the supervisor aborts from
    outside long before. ``dial``: where to connect to reach a process, by its name, that listens at
    an address; None: there. ``name``: of this process.

    Every wait looks up each ``POLL``: gloo can lose the wake-up of a thread whose connection is
    just being shut down (in about 1 of 30 aborts), which would wait for the whole timeout. Such an
    operation is abandoned.
    """

    def __init__(
        self,
        *,
        generation: int,
        rank: int,
        world: int,
        store_port: int,
        backend: str,
        timeout_s: float,
        check: Callable[[], None],
        mesh: Mesh = Mesh(),
        name: str = "",
        dial: Callable[[str, Address], Address] | None = None,
        link: StoreLink | None = None,
        net: NetworkAddresses = NetworkAddresses(),
        collective_timeout_s: float | None = None,
        device: str = "cpu",
    ) -> None:
        self.generation = generation
        self.called = f"generation-{generation}"  # in the store, and in the flight recorder
        self.rank = rank
        self.world = world
        self.layout = Layout(world=world, shards=mesh.cells)
        self._mesh = mesh
        self.everyone: Circle
        self.holders: Circle
        self.same: Circle
        self.abandoned = self._aborted = False
        self._store_at = (net.store_host, store_port)
        self._address = net.address
        self.backend = backend
        self.device = torch.device(device)
        if backend == "nccl" and self.device.type != "cuda":
            raise ValueError(f"NCCL exchanges what is on a GPU, and this rank is on {device}")
        self._timeout = timedelta(seconds=timeout_s)
        self._patience = timedelta(seconds=collective_timeout_s or timeout_s)
        self._check = check
        self._dial = dial
        self._name = name
        self._roll: RankNames | None = None
        self._link = link
        self._foreign = socket_inodes() - self._linked()
        self._own: set[str] | None = None
        self._made: list[Any] = []
        self._circles: list[Circle] = []
        self._aborts = nccl.CommunicatorAborter()
        self._forming: Future[list[Circle]] | None = None
        self._latest: dist.Work | None = None
        self.begun = Begun()

    @property
    def ranks(self) -> range:
        """All."""
        return range(self.world)

    def form(self) -> None:
        """Connect to the other members. Raises GenerationLost when that fails.

        Runs on a thread of its own, left to its timeouts when the generation is aborted: nothing
        ends the wait for a store that is gone, a peer lost before it connected (gloo), or one that
        does not come (NCCL).
        """
        made = self._forming = Future[list[Circle]]()
        probe = torch.zeros(1, device=self.device) if self.backend == "nccl" else None
        args = (made, partial(self._make, probe))
        threading.Thread(target=_settle, args=args, name="form-group", daemon=True).start()
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        while not wait([made], timeout=POLL.total_seconds()).done:
            try:
                self._check()
                # NCCL itself waits for ever
                if self.backend == "nccl" and time.monotonic() > deadline_s:
                    raise GenerationLost(
                        f"could not form the group within {self._timeout.total_seconds():g} s"
                    )
            except GenerationLost:
                self.abort()
                wait([made], timeout=LAST_CHANCE_S)
                raise
        try:
            self._circles = made.result()
        except DEVICE_ERRORS:
            raise
        except (RuntimeError, ValueError) as error:
            if self.backend == "nccl" and not isinstance(error, RuntimeError):
                # this rank has no GPU, or passed a tensor on the CPU: another generation would fail
                # alike
                raise
            raise GenerationLost(f"could not form the group: {first_line(error)}") from error
        self.everyone, self.holders = self._circles[:2]
        self.same = self._circles[-1] if self._mesh.context > 1 else self.holders
        if self.backend != "nccl":
            for each in self._made:
                each._set_default_timeout(self._patience)
        self._own = self._opened()

    def _opened(self) -> set[str]:
        return socket_inodes() - self._foreign - self._linked()

    def _make(self, probe: Tensor | None = None) -> list[Circle]:
        """The circles of this rank, as ``circles_of`` has them; two of the same ranks are one, but
        for ``SAME``. ``probe``: a value on the device, by which NCCL is connected.
        """
        if probe is not None:
            torch.cuda.set_device(self.device)  # a thread's own: it begins on GPU 0
        client, wanted = self._client(), circles_of(self._mesh, self.layout, self.rank)
        if self._dial is not None:
            names = dist.PrefixStore(f"{self.called}/names", client)
            self._roll = RankNames(names, self.rank, self._name)
        keys = [(tuple(ranks), name.startswith(SAME)) for name, ranks in wanted.items()]
        circles: dict[tuple[tuple[int, ...], bool], Circle] = {}
        for key, (name, ranks) in zip(keys, wanted.items(), strict=True):
            if key in circles:
                continue
            made = None
            if len(ranks) > 1 or not name:
                made = self._meet(client, ranks, self.called + name)
                self._made.append(made)
                if probe is not None:
                    self._connect(made, probe)
            circles[key] = Circle(self, ranks, made)
        if self.rank == 0:
            args = (client, self.called)
            threading.Thread(target=forget_former, args=args, name=LEAVING, daemon=True).start()
        if self._link is not None and not self._aborted:
            self._link.keep(self._store_at, client, self._link.inode or socket_to(self._store_at))
        return [circles[key] for key in keys]

    def _meet(self, client: dist.Store, ranks: Sequence[int], called: str) -> Any:
        """Torch's process group of these ranks; ``called``: in the store and flight recorder."""
        place, size = ranks.index(self.rank), len(ranks)
        store: dist.Store = dist.PrefixStore(called, client)
        if self.backend == "nccl":
            return nccl.meet(store, place, size, self._patience, called)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options.group_name = self._timeout, called
        options._threads = 2
        dial = self._dial
        options._devices = [gloo_device(self._address or (address_of(self.rank) if dial else ""))]
        if dial is not None and self._roll is not None:
            store = RedirectingStore(store, place, self._roll.by_rank(dial, ranks))
        return self._gloo(store, place, size, options)

    def _gloo(self, store: dist.Store, place: int, size: int, options: Any) -> Any:
        return dist.ProcessGroupGloo(store, place, size, options)

    def _connect(self, made: Any, probe: Tensor) -> None:
        if self._aborted:  # no other member would come any more
            raise GenerationLost("aborted while the group was formed")
        self.began(nccl.connect(made, probe), probe)

    def _linked(self) -> set[str]:
        """The socket of the connection to the store, if it is to outlive the generation."""
        return {self._link.inode} if self._link else set()

    def _client(self) -> dist.TCPStore:
        kept = self._link.take(self._store_at) if self._link else None
        if kept is not None:
            kept.set_timeout(self._timeout)
            return kept
        return connect(self._store_at, self._timeout, self._check, lambda: self._aborted)

    def circle(self, name: str) -> Circle:
        """By name: ``everyone``, ``replicate`` for the holders, or a dimension."""
        if name == "everyone":
            return self.everyone
        return self.holders if name == "replicate" else self._circles[2 + DIMS.index(name)]

    def start_all_reduce(self, tensor: Tensor) -> dist.Work:
        """Begin to sum ``tensor`` over all ranks, in place. Raises GenerationLost."""
        work = self.everyone.start_all_reduce(tensor)
        assert work is not None
        return work

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy ``tensor`` from rank ``source`` to all. Raises GenerationLost."""
        self.everyone.broadcast(tensor, source)

    def wait(self, work: dist.Work) -> None:
        """Have what comes next on this thread come after an operation. Raises GenerationLost when
        it fails or the generation is aborted.
        """
        # NCCL has the stream wait here, not the host: ``settle`` does. Gloo's own timeout ends the
        # loop at the latest.
        while self.backend != "nccl" and not ended_in(work, POLL):
            try:
                self._check()
            except GenerationLost:
                self._abandon(work)
                raise
        try:
            work.wait()
        except DEVICE_ERRORS:
            raise
        except RuntimeError as error:
            raise GenerationLost(first_line(error)) from error
        self.begun.waited_for(work)

    def began(self, work: dist.Work, uses: Any) -> None:
        """An operation was begun. ``uses``: its tensors, or what holds them; kept of NCCL's, which
        runs on a stream of its own, and whose last one tells ``settle`` if a communicator fails.
        """
        if self.backend == "nccl":
            self._latest = work
        self.begun.add(work, uses if self.backend == "nccl" else None)

    def unfinished(self) -> int:
        """How many operations were begun and are not done; asked on any thread. NCCL's may be
        waited for by a stream, and not be done.
        """
        latest = self._latest
        return self.begun.unfinished() or int(latest is not None and not latest.is_completed())

    def settle(self) -> None:
        """Wait until what was received is in place and whole. Raises GenerationLost.

        NCCL only enqueues: this polls, since neither an abort nor the error of a communicator would
        end a wait of CUDA's. An aborted kernel ends with garbage and no error.
        """
        if self.backend == "nccl":
            nccl.await_device(self.device, self._look)
            self._look()

    def read(self, values: Tensor) -> list[Any]:
        """The numbers of a small tensor that was received, or follows from what was. Raises
        GenerationLost.
        """
        self.settle()
        found: list[Any] = values.tolist()
        self._check()
        return found

    def _look(self) -> None:
        """Raise GenerationLost if the awaited data do not come, or come as garbage."""
        self._check()
        if self._aborted:
            raise GenerationLost("aborted")
        work = self._latest
        if work is not None and work.is_completed():
            try:
                work.wait()  # raises what made it end
            except DEVICE_ERRORS:
                raise
            except RuntimeError as error:
                raise GenerationLost(first_line(error)) from error
            self._latest = None

    def abort(self) -> int:
        """Break every connection of the group; blocked calls raise. Safe to repeat. Returns the
        sockets shut down.
        """
        self._aborted = True
        if self.backend == "nccl":
            # A communicator that is not made yet cannot be aborted: what it waits for are sockets.
            # One that is made has to be, and ends with its kernels.
            broken = self._break_off(socket_inodes() - self._foreign) if self._own is None else 0
            self._aborts.abort(self._made)
            return broken
        own, foreign = self._own, self._foreign
        return shut_down(lambda inode: inode not in foreign if own is None else inode in own)

    def _break_off(self, sockets: set[str]) -> int:
        return shut_down(lambda inode: inode in sockets, listening=True)

    def leave(self) -> None:
        """Release the group, also a broken one."""
        self.abort()
        self._latest, left = None, self.begun.take()
        for work, _ in left if self.backend == "nccl" else ():
            # what an aborted kernel still writes comes before what the next generation does
            work.synchronize()
        if self.backend == "nccl" and self._forming is not None and not self._forming.done():
            # Sockets it opens from now on cannot be told from the next generation's.
            args = (self._forming, list(self._made), socket_inodes() - self._foreign)
            threading.Thread(
                target=self._see_off, args=args, name="see-off-group", daemon=True
            ).start()
        if not self.abandoned:
            made, self._made = self._made, []
            for circle in self._circles:
                circle.close()
            # Gloo's threads check every 10 ms whether to end: not worth a wait.
            threading.Thread(target=made.clear, name=LEAVING, daemon=True).start()

    def _see_off(self, forming: Future[list[Circle]], made: list[Any], sockets: set[str]) -> None:
        """Abort an abandoned set-up until it ends, with everything it has begun or made, even at
        the last moment.
        """
        deadline_s = time.monotonic() + SEE_OFF_S
        while time.monotonic() < deadline_s:
            done = forming.done()
            if not done:
                self._break_off(sockets)
            self._aborts.abort(made)
            if done and not self.begun.unfinished():
                return
            time.sleep(SEE_OFF_PAUSE_S)

    def _abandon(self, work: dist.Work) -> None:
        """Give an operation a last chance to notice that its connections are gone, then leave it to
        itself.
        """
        self.abort()
        deadline = time.monotonic() + LAST_CHANCE_S
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.abandoned = True
                threading.Thread(
                    target=self._outlive, args=(work,), name=ABANDONED, daemon=True
                ).start()
                return
            time.sleep(0.001)

    def _outlive(self, work: dist.Work) -> None:
        """Hold torch's groups until an operation that was given up has ended: an earlier release
        would join the thread that waits in it.
        """
        deadline_s = time.monotonic() + self._patience.total_seconds() + GRACE_S
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._made))
                return
            time.sleep(ABANDONED_LOOK_S)
        threading.current_thread().name = LEAVING
        for circle in self._circles:
            circle.close()
        self._made.clear()


@atexit.register
def _await_leaving() -> None:
    """A thread that returns from gloo or NCCL after the interpreter has ended aborts the
    process.
    """
    deadline_s = time.monotonic() + END_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        threads = [one for one in threading.enumerate() if one.name in (LEAVING, nccl.ABORTING)]
        if not threads:
            return
        try:
            threads[0].join(left_s)
        except RuntimeError:  # another thread is about to start it
            time.sleep(STARTING_S)


def ended_in(work: dist.Work, limit: timedelta) -> bool:
    """Whether an operation has ended, well or badly, after waiting up to ``limit`` for it."""
    try:
        work.wait(limit)
    except RuntimeError:
        # Failed, or the time was up; it may even have succeeded since then, so the error itself
        # tells nothing.
        return bool(work.is_completed())
    return True


def gloo_device(address: str) -> Any:
    """Where gloo listens: at a numeric address, which it need not look up; "": on the loopback."""
    if address:
        return dist.ProcessGroupGloo.create_device(hostname=address)
    return dist.ProcessGroupGloo.create_device(interface=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))


def _settle(made: Future[Any], make: Callable[[], Any]) -> None:
    try:
        made.set_result(make())
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # of what they hold open
        made.set_exception(error)
    finally:
        del made, make  # an exception keeps this frame, and the frame the exception
