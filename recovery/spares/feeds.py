"""A rank's part in keeping spares up to date: what it keeps of each step, and whom it feeds.

The training thread hands over the buffers of a step's gradients once the optimizer has used them,
without a copy. They are kept until the next step is applied, and for as long as a spare has not
received them.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.collectives.buckets import Buffers
from trainchaos.recovery.collectives.reduce import Reducer
from trainchaos.recovery.spares import replay
from trainchaos.recovery.spares.feed import Feed, Item
from trainchaos.recovery.spares.hostcopy import Fence, HostCopy
from trainchaos.recovery.state.fingerprint import sampled_digest
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import quiet
from trainchaos.recovery.transport import wire


class Feeds:
    """Used by the training thread, except ``told``. ``write``: logs an event of this rank."""

    def __init__(self, *, lag: int, write: Callable[..., None]) -> None:
        self.retained: HeldGradients | None = None
        self._lag = lag
        self._write = write
        self._orders: deque[wire.Feed] = deque()
        self._fed: list[Feed] = []
        self._pool = Pool()
        self._copies = False  # the optimizer writes into the gradients: they are copied before
        self._versions: list[int] = []
        self._current: HeldGradients | None = None  # of the step that is being applied
        self._before = self._after = ""
        self._taken: HostCopy | None = None  # of the whole state, made while a step is computed

    def told(self, order: wire.Feed) -> None:
        """The supervisor wants this rank to feed a spare; on any thread."""
        self._orders.append(order)

    def prepare(self, reducer: Reducer) -> None:
        """Have a second set of buffers before anybody waits: fresh memory takes a while to get."""
        first = reducer.held()
        reducer.hand_over(self._pool.take())
        self._pool.free.append((first, None))

    def leaves(self) -> None:
        """This rank is in no generation; in the next one the supervisor says anew who feeds whom.
        What waits is sent all the same.
        """
        self._orders.clear()
        for fed in self._fed:
            fed.close()
        self._fed = []
        self._state_changes()

    def forget(self) -> None:
        """The state becomes another than what the retained gradients led to."""
        if self.retained is not None:
            self.retained.release()
            self.retained = None

    def before(self, state: TrainState, reducer: Reducer) -> None:
        """The optimizer is about to use the gradients."""
        held = reducer.held()
        self._versions = [part.flat._version for part in held]
        if self._copies:
            held = [_copy_of(part) for part in held]
        none = replay.without_gradient(state)
        self._current = HeldGradients(state.step + 1, held, none, self._pool)
        self._state_changes()
        self._before = replay.text_of(state) if self._fed else ""
        for fed in self._fed:
            self._begin_step(fed, state, self._current)

    def after(self, state: TrainState, reducer: Reducer, loss: float) -> None:
        """The step is applied, and ``state`` is that of after it."""
        changed = [part.flat._version for part in reducer.held()] != self._versions
        self.forget()  # of the step before, whose buffers are free then unless a spare lacks them
        if not self._copies:
            reducer.hand_over(self._pool.take())
        self.retained, self._current = self._current, None
        if self.retained is not None:
            self.retained.loss = loss
        if changed and not self._copies:
            self._copies = True
            self._pool.close()  # the reducer keeps the buffers that it has
            self.forget()  # what the optimizer was given is gone: this step cannot be retold
        for fed in self._fed:
            self._tell(fed, state)
        self._after = replay.text_of(state) if self._fed or self._orders else ""
        self._fed = [fed for fed in self._fed if not self._is_over(fed, state.step)]
        while self._orders:
            self._begin(self._orders.popleft(), state)

    def check(self, step: int, digest: str) -> None:
        """Have spares compare their state of ``step`` with a digest of all of it."""
        for fed in self._fed:
            if not fed.wants_state:
                fed.offer(Item(header={"kind": "digest", "step": step, "digest": digest}))

    def close(self) -> None:
        """End all feeds."""
        for fed in self._fed:
            fed.close(now=True)
        self._fed = []

    def _state_changes(self) -> None:
        if self._taken is not None:
            self._taken.hold_writers()
            self._taken = None

    def _begin(self, order: wire.Feed, state: TrainState) -> None:
        for fed in [fed for fed in self._fed if fed.spare == order.spare]:
            if fed.address == order.address:
                return
            fed.close(now=True)
            self._fed.remove(fed)
        base = (state.step, "" if order.anew else sampled_digest(state))
        last = None if order.anew else self._last_item(state)
        self._fed.append(Feed(order.spare, order.address, lag=self._lag, base=base, last=last))

    def _is_over(self, fed: Feed, step: int) -> bool:
        if fed.ended:
            self._write(Kind.SPARE_DROPPED, step=step, spare=fed.spare, why=fed.ended)
        return bool(fed.ended)

    def _tell(self, fed: Feed, state: TrainState) -> None:
        if fed.differs:
            fed.differs = False
            self._drop(fed, state.step, "its state differs")
        if fed.wants_state:
            if state.step >= fed.due:
                fed.later(state.step)
                fed.wants_state = not fed.offer(self._snapshot(state))
            return
        if fed.begun != state.step:
            return  # it began in the midst of the step, or what it was to get is void
        if self.retained is None:
            self._drop(fed, state.step, "the optimizer has changed the gradients")
            return
        header, copy = outcome(state, self.retained)
        if self._before != self._after:
            header["before"] = json.loads(self._before)
        fed.offer(Item(header=header, copies=[copy]))

    def _begin_step(self, fed: Feed, state: TrainState, held: HeldGradients) -> None:
        """Send the gradients, while the optimizer makes its step with them."""
        if fed.ended or fed.wants_state or fed.differs:
            return
        copy, done = held.lend()
        item = Item(header=gradients(state, held), copies=[copy], done=done)
        if fed.offer(item, step=True):
            fed.begun = held.step
        elif not fed.ended:
            self._drop(fed, state.step, f"it lags by more than {self._lag} steps")
            fed.later(state.step)

    def _drop(self, fed: Feed, step: int, why: str) -> None:
        self._write(Kind.SPARE_DROPPED, step=step, spare=fed.spare, why=why)
        fed.start_again()
        fed.offer(Item(header={"kind": "dropped", "why": why}))

    def _snapshot(self, state: TrainState) -> Item:
        """The whole state, copied in memory: training goes on meanwhile."""
        besides = state.besides()
        rest = {name: one for name, one in state.parts().items() if name not in besides}
        first = HostCopy([*besides.values()], apart=True)
        first.hold_writers()  # a forward pass changes buffers; the rest is the optimizer's
        self._taken = HostCopy([*rest.values()], apart=True)
        names = [*besides, *rest]
        header = {"kind": "state", "tensors": names, "scalars": state.scalars()}
        return Item(header=header, copies=[first, self._taken])

    def _last_item(self, state: TrainState) -> Item | None:
        """The step applied last, for a spare that holds the one before it."""
        held = self.retained
        if held is None or held.step != state.step:
            return None
        return retold(state, held)


def gradients(state: TrainState, held: HeldGradients) -> dict[str, Any]:
    """What goes before the gradients of a step."""
    return {
        "kind": "gradients",
        "step": held.step,
        "names": replay.names_in(state, held.buffers),
        "none": held.none,
    }


def outcome(state: TrainState, held: HeldGradients) -> tuple[dict[str, Any], HostCopy]:
    """What does not follow from the gradients of a step. ``state``: after that step."""
    besides = state.besides()
    header: dict[str, Any] = {
        "kind": "step",
        "step": held.step,
        "loss": held.loss,
        "besides": list(besides),
        "scalars": state.scalars(),
    }
    copy = HostCopy([*besides.values()], apart=True)
    copy.hold_writers()  # a forward pass changes buffers
    return header, copy


def retold(state: TrainState, held: HeldGradients) -> Item:
    """Both together."""
    (given, done), (then, rest) = held.lend(), outcome(state, held)
    return Item(header=gradients(state, held) | then, copies=[given, rest], done=done)


def _copy_of(part: Buffers) -> Buffers:
    flat = part.flat.clone()
    size = part.gradients.numel()
    return Buffers(
        flat=flat,
        gradients=flat[:size],
        tail=flat[size:],
        views=[],
        parameters=[*part.parameters],
    )


class HeldGradients:
    """The gradients of one step, as the optimizer was given them: for a spare that has not received
    them yet, and of the last step for one that lacks it at its promotion. ``none``: parameters
    without; ``loss``: of the step, known once it is applied.

    Used until each of those that use them has called ``release``.
    """

    def __init__(
        self, step: int, buffers: Sequence[Buffers], none: Sequence[str], pool: Pool
    ) -> None:
        self.step = step
        self.loss = 0.0
        self.buffers = list(buffers)
        self.none = list(none)
        self._pool = pool
        self._uses = 1
        self._copy: HostCopy | None = None

    def lend(self) -> tuple[HostCopy, Callable[[], None]]:
        """The bytes of each buffer's gradients, and what to call once they are of no more use. Of
        buffers on a GPU there is one copy, however many ask; who has it does not keep the buffers.
        For the training thread.
        """
        gradients = [part.gradients for part in self.buffers]
        if not any(part.is_cuda for part in gradients):
            return HostCopy(gradients, apart=False), self.use().release
        if self._copy is None:
            self._copy = HostCopy(gradients, apart=True)
        return self._copy, quiet

    def use(self) -> HeldGradients:
        """One more user. Called by one that uses them, so that they are not gone."""
        with self._pool.lock:
            self._uses += 1
        return self

    def release(self) -> None:
        """One user less; after the last the buffers are free for another step."""
        with self._pool.lock:
            self._uses -= 1
            if not self._uses and len(self._pool.free) < self._pool.most:
                fence = None if self._copy is None else self._copy.fence
                self._pool.free.append((self.buffers, fence))


class Pool:
    """Sets of buffers that are ``free`` to be used again, at most ``most``; thread-safe."""

    def __init__(self, *, most: int = 2) -> None:
        self.lock = threading.Lock()
        self.free: list[tuple[list[Buffers], Fence | None]] = []
        self.most = most

    def take(self) -> list[Buffers]:
        """A free set, or an empty one: new ones are made then."""
        with self.lock:
            buffers, fence = self.free.pop() if self.free else ([], None)
        if fence is not None:
            fence.hold_writers()
        return buffers

    def close(self) -> None:
        """No set is used again."""
        with self.lock:
            self.most = 0
            self.free.clear()
