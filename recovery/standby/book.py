"""The supervisor's list of groups that stand by: which it has asked for, and which are formed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.transport.wire import Message, StandBy, StoodBy

Members = tuple[str, ...]


@dataclass(kw_only=True)
class _Group:
    """One that was asked for. ``formed``: members that are connected to all others."""

    name: str
    members: Members
    formed: set[str] = field(default_factory=set)

    @property
    def stands(self) -> bool:
        return len(self.formed) == len(self.members)


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
        self._groups: dict[int, _Group] = {}
        self._asked = 0
        # no two groups meet under one name, though they have the same members: also not those of
        # a supervisor that was lost
        self._tag = secrets.token_hex(4)

    def ask(self, generation: int, groups: Mapping[int, Members], store_port: int) -> None:
        """Have each of these groups formed, unless it was asked for already. ``groups``: rank that
        may be lost -> members by rank. A group takes the place of an earlier one for that rank.
        """
        if generation != self._generation:
            self._generation, self._groups = generation, {}
        for lost, members in sorted(groups.items()):
            former = self._groups.get(lost)
            if former is not None and former.members == members:
                continue
            self._asked += 1
            # by which the keys of the group that it takes the place of are found and deleted
            name = f"{self._tag}-{lost}-{self._asked}"
            self._groups[lost] = _Group(name=name, members=members)
            for rank, process in enumerate(members):
                order = StandBy(
                    generation=generation,
                    lost=lost,
                    group=name,
                    rank=rank,
                    world=len(members),
                    store_port=store_port,
                )
                self._send(process, order)

    def formed(self, process: str, message: StoodBy) -> None:
        """A process has connected to all others of a group."""
        for lost, group in self._groups.items():
            if group.name == message.group and process in group.members and not group.stands:
                group.formed.add(process)
                if group.stands:
                    self._record(Kind.STANDBY_FORMED, lost=lost, members=list(group.members))

    def use(self, members: Sequence[str]) -> str:
        """Name of the group of these members if all of them stand by in it, else "". No group
        stands by after this: all are of the generation that ends.
        """
        groups, self._groups = self._groups.values(), {}
        wanted = tuple(members)
        return next((one.name for one in groups if one.members == wanted and one.stands), "")
