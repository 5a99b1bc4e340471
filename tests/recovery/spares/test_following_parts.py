"""Ranks that hold a model together feed spares, each the one that has its part: real processes, and
after each step both hold the same, bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.recovery.mesh.test_mesh_training import LIMIT, Part
from tests.support.ranks import Self, ranks
from tests.support.running import until
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.spares import replay
from trainchaos.recovery.spares.feeds import Feeds
from trainchaos.recovery.spares.follower import Follower
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.state.parts import local
from trainchaos.recovery.transport.wire import Feed

pytestmark = pytest.mark.real
STEPS, LATE = 6, 2
NEVER_LAGS = 64
MESHES = [
    Mesh(shard=2),
    Mesh(tensor=2),
    Mesh(pipeline=2),
    Mesh(context=2),
    Mesh(shard=2, pipeline=2),
    Mesh(pipeline=2, tensor=2),
]
IDS = [mesh.described().replace(" ", "") for mesh in MESHES]


class Log:
    """Events of a process."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def write(self, kind: Any, /, **data: Any) -> None:
        self.events.append((kind.value, data))


def of_one_replica(me: Self, mesh: Mesh) -> bool:
    """Number ranks and spares from 0 each; whether this one is a rank."""
    trains = me.rank < mesh.cells
    me.rank, me.world = me.rank % mesh.cells, mesh.cells
    return trains


def held(part: Part) -> tuple[int, dict[str, str], str]:
    """Step and digests of all that a process holds."""
    return part.state.step, part.state.digests(), fingerprint(part.state)


def take_part(mesh: Mesh, first: int, me: Self) -> Any:
    """Train as a rank, and feed a spare from after step ``first`` on, or follow as one."""
    trains = of_one_replica(me, mesh)
    part, log = Part(me, mesh), Log()
    if not trains:
        return follow(part, log, me)
    part.join()
    feeds = Feeds(lag=NEVER_LAGS, write=log.write)
    feeds.prepare(part.reducer)
    address = me.hear()
    for number in range(STEPS):
        if number + 1 == first:
            feeds.told(Feed(spare="s", address=address))
        reduced = part.attempt()
        part.reducer.clip(reduced.grad_norm, LIMIT)
        feeds.before(part.state, part.reducer)
        part.state.apply(reduced.loss)
        part.state.step += 1
        part.state.last = [float(part.state.step), reduced.loss, float(reduced.samples), 1.0]
        feeds.after(part.state, part.reducer, reduced.loss)
        feeds.check(part.state.step, fingerprint(part.state))
    while first > 1 and feeds._fed[0].wants_state:  # until it is due
        feeds._tell(feeds._fed[0], part.state)
    feeds.leaves()
    me.say(held(part))
    me.hear()
    return log.events


def follow(part: Part, log: Log, me: Self) -> Any:
    follower = Follower(
        part.state,
        host="127.0.0.1",
        write=log.write,
        changed=lambda: None,
    )
    follower.start()
    me.say(follower.address)
    me.hear()
    until(lambda: follower.step == STEPS)
    follower.settle(STEPS, lambda: None)
    me.say(held(part))
    size = sum(tensor.nbytes for tensor in part.state.parts().values())
    return log.events, size


def play(mesh: Mesh, first: int) -> tuple[list[Any], list[Any], list[Any]]:
    """What ranks and spares hold in the end, and what each spare has written."""
    cells = mesh.cells
    with ranks(partial(take_part, mesh, first), 2 * cells) as everyone:
        trainers, spares = everyone[:cells], everyone[cells:]
        for rank, spare in zip(trainers, spares, strict=True):
            rank.tell(spare.said())
        ours = [rank.said() for rank in trainers]
        for one in spares:
            one.tell("all is sent")
        theirs = [spare.said() for spare in spares]
        said = [spare.result() for spare in spares]
        for one in trainers:
            one.tell("it is over")
        dropped = [rank.result() for rank in trainers]
    assert dropped == [[]] * cells
    return ours, theirs, said


@pytest.mark.parametrize("mesh", MESHES, ids=IDS)
@pytest.mark.sample(2)
def test_a_spare_that_holds_a_part_follows_it_without_a_copy(mesh: Mesh) -> None:
    ours, theirs, said = play(mesh, first=1)
    assert ours == theirs and {step for step, _, _ in ours} == {STEPS}
    assert len({digest for _, _, digest in ours}) == (1 if mesh.context > 1 else mesh.cells)
    equal = ("spare_synced", {"step": 1, "how": "equal", "bytes": 0, "seconds": 0.0})
    assert [events for events, _ in said] == [[equal]] * mesh.cells


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", [Mesh(shard=2), Mesh(pipeline=2, tensor=2)], ids=IDS[:1] + IDS[-1:]
)
@pytest.mark.sample(1)
def test_a_spare_that_comes_late_gets_its_part_and_no_more(mesh: Mesh) -> None:
    ours, theirs, said = play(mesh, first=LATE)
    assert ours == theirs
    for events, size in said:
        ((kind, data),) = events
        assert (kind, data["how"], data["bytes"]) == ("spare_synced", "copy", size)


def give_gradients(me: Self) -> Any:
    """Gradients of a part, as a spare makes them of what comes."""
    part = Part(me, Mesh(tensor=2))
    state, buffers = part.state, part.reducer.held()
    names = replay.names_in(state, buffers)
    flats = [buffer.gradients.clone().fill_(2.0) for buffer in buffers]
    found = replay.gradients_of(state, names, flats, [])
    for name, gradient in found.items():
        mine: Any = state.trained[name]
        other: Any = gradient
        assert type(gradient) is type(mine.data) and local(gradient).shape == local(mine).shape
        assert getattr(other, "placements", None) == getattr(mine, "placements", None)
    with pytest.raises(ValueError, match="of another model"):
        replay.gradients_of(state, names, [flat[1:] for flat in flats], [])
    whole = sum(parameter.numel() for parameter in state.trained.values())
    return sum(local(gradient).numel() for gradient in found.values()), whole


def test_gradients_are_of_what_is_held_here_alone() -> None:
    with ranks(give_gradients, 2) as everyone:
        for here, whole in [rank.result() for rank in everyone]:
            assert here < whole
