"""The supervisor's list of groups that stand by: which it has asked for, and which are formed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.transport.wire import Message, StandBy, StoodBy

Members = tuple[str, ...]


class StandbyBook:
    """Groups for the loss of each rank of one generation. ``send``: sends a message to a process,
    by its name; ``record``: logs an event.
    """

    def __init__(
        self, send: Callable[[str, Message], object], record: Callable[..., object]
    ) -> None:
        self._send = send
        self._record = record
        self._generation = 0
        self._groups: dict[int, Members] = {}
        self._formed: dict[Members, set[str]] = {}

    def ask(self, generation: int, groups: Mapping[int, Members], store_port: int) -> None:
        """Have each of these groups formed, unless it was asked for already. ``groups``: rank that
        may be lost -> members by rank. A group takes the place of an earlier one for that rank.
        """
        if generation != self._generation:
            self._generation, self._groups, self._formed = generation, {}, {}
        for lost, members in sorted(groups.items()):
            if self._groups.get(lost) == members:
                continue
            self._groups[lost], self._formed[members] = members, set()
            for rank, name in enumerate(members):
                order = StandBy(
                    generation=generation,
                    lost=lost,
                    group=name_of(members),
                    rank=rank,
                    world=len(members),
                    store_port=store_port,
                )
                self._send(name, order)

    def formed(self, process: str, message: StoodBy) -> None:
        """A process has connected to all others of a group."""
        if message.generation != self._generation:
            return
        for lost, members in self._groups.items():
            done = self._formed[members]
            if name_of(members) == message.group and process in members and process not in done:
                done.add(process)
                if len(done) == len(members):
                    self._record(Kind.STANDBY_FORMED, lost=lost, members=list(members))

    def use(self, members: Sequence[str]) -> str:
        """Name of the group of these members if all of them stand by in it, else "". No group
        stands by after this: all are of the generation that ends.
        """
        wanted = tuple(members)
        ready = self._formed.get(wanted) == set(wanted)
        self._generation, self._groups, self._formed = 0, {}, {}
        return name_of(wanted) if ready else ""


def name_of(members: Sequence[str]) -> str:
    """What a group is called."""
    return ".".join(members)
