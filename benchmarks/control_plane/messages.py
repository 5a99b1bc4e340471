"""Cost of the messages between a coordinator and one agent: ``python -m
benchmarks.control_plane.messages``.

The product's own links over a socket pair, without a network and with nothing else to do: what a
heartbeat takes, and what the orders of a failure and their answers take, of processor time at each
end. Times the number of nodes they are the least that a mass failure can take.
"""

from __future__ import annotations

import gc
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

from msgspec import structs

from benchmarks.harness import markdown, options
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.link import Link, Post
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import Abort, Join, Joined, Message, Parked

RANKS = 8  # of a node
NOW_NS = 10**13
ORDERS = (
    ("leave", Abort(generation=1), Parked(generation=1, step=17, valid=True, why="aborted")),
    (
        "join",
        Join(generation=2, rank=0, world=16128, store_port=1, timeout_s=60.0),
        Joined(generation=2, step=17, checkpoint=None),
    ),
)


class Pair:
    """A coordinator's end and an agent's."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.link, self.agents = Link(ours, b"k", agent=False), Link(theirs, b"k", agent=True)
        self.outbox, self.post = Post(limit=1 << 20), Post(limit=1 << 20)

    def order(self, message: Message, first: int) -> None:
        """Tell the ranks of the node, numbered from ``first``."""
        for rank in range(first, first + RANKS):
            mine = structs.replace(message, rank=rank) if isinstance(message, Join) else message
            self.outbox.tell(f"w{rank}", mine)
        self.outbox.pump(self.link)
        self.link.flush()

    def obey(self, answer: Message) -> None:
        """Read what came, and answer for each rank."""
        letters = []
        for parcel in self.agents.take():
            self.post.accept(parcel)
            letters += [(name, structs.replace(answer)) for name, _ in parcel.frame.messages()]
        assert len(letters) == RANKS, "each rank is told once"
        for frame in protocol.Heard.of(letters):
            self.post.add(frame)
        self.post.pump(self.agents)
        self.agents.flush()

    def hear(self) -> None:
        """Read the answers."""
        parcels = self.link.take()
        assert parcels, "something was said"
        for parcel in parcels:
            self.outbox.accept(parcel)
            if isinstance(parcel.frame, protocol.Heard):
                parcel.frame.messages()

    def ping(self) -> None:
        """Ask for the agent's clock."""
        self.link.put(protocol.Ping(sent_ns=NOW_NS), got=1)
        self.link.flush()

    def say(self, frame: Message) -> None:
        """Have the agent say something."""
        self.agents.take()
        self.agents.put(frame)
        self.agents.flush()


def measured(rounds: int) -> dict[str, float]:
    """Medians, microseconds of processor time for one node of RANKS ranks. Meanwhile no search for
    reference cycles runs, of which a coordinator has few.
    """
    spent, pair = defaultdict[str, list[float]](list), Pair()

    def timed(what: str, act: Callable[..., object], *arguments: object) -> None:
        begun = time.process_time()
        act(*arguments)
        spent[what].append(time.process_time() - begun)

    searched = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            for name, order, answer in ORDERS:
                timed(f"{name}: the coordinator orders", pair.order, order, number * RANKS)
                timed(f"{name}: the agent answers", pair.obey, answer)
                timed(f"{name}: the coordinator hears", pair.hear)
            timed("ping", pair.ping)
            pair.say(protocol.Pong(sent_ns=NOW_NS, received_ns=NOW_NS, answered_ns=NOW_NS))
            timed("its answer", pair.hear)
            marks = {f"w{rank}": Mark(1, 17, "forward", 1, NOW_NS, 17, 0) for rank in range(RANKS)}
            pair.say(protocol.Beat(time_ns=NOW_NS, marks=marks, states={}))
            timed("a report of marks", pair.hear)
    finally:
        if searched:
            gc.enable()
    return {what: 1e6 * median(times) for what, times in spent.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=1500)
    rounds = parser.parse_args(arguments).rounds
    rows = [[what, f"{micros:.0f}"] for what, micros in measured(rounds).items()]
    of = f"of one node with {RANKS} ranks (n={rounds})"
    print(markdown([of, "processor time, us"], rows))


if __name__ == "__main__":
    main()
