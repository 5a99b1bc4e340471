"""Asks ranks for their stacks, and for the collectives they stand in, while they are only suspected
to hang, so that the answers are there when the limit is over, and the answer to a hang waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.detection.absent import absence
from trainchaos.recovery.detection.hangs import Hang
from trainchaos.recovery.process.stacks import training_frames
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import Message, Recall, Recalled

EVERY_S = 10.0
"""Shortest time between two requests to one process: a dump takes it about a millisecond, and a
rank that is often late must not pay for it with each step.
"""
LATE_S = 0.6
"""For what is seen of a process from outside after it was declared to hang: twice as long as its
end is put off (``recovery.process.last_look``).
"""
MOST_ASKED = 4
"""Processes asked for their stacks at one moment: in a stall of all ranks a few tell where they
stand.
"""
MOST_RECALLED = 1024
"""And for their collectives: who has left one out is found only among those that are asked."""


class Witness(Protocol):
    """The part of ``recovery.supervise.supervision.Hands`` that is needed here."""

    def now_s(self) -> float:
        """Monotonic seconds."""

    def ask_stacks(self, process: str) -> None:
        """See Hands."""

    def stacks(self, process: str) -> tuple[str, str] | None:
        """See Hands."""

    def send(self, process: str, message: Message) -> bool:
        """See Hands."""

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> object:
        """See Hands."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A process that was asked: its mark then, and who was asked with it for contrast.
    ``number``: of the request for its collectives, 0: it could not be sent; ``told``: what it says
    is written down.
    """

    mark: Mark
    peers: tuple[str, ...]
    number: int
    told: bool = True


class HangEvidence:
    """Who was asked, in which silence."""

    def __init__(self, hands: Witness) -> None:
        self._hands = hands
        self._asked: dict[str, _Asked] = {}
        self._asked_s: dict[str, float] = {}
        self._numbers = 0
        self._late: dict[str, tuple[_Asked, float]] = {}  # declared to hang, and until when
        self._recalled: dict[str, Recalled] = {}  # the last answer of each that was asked

    def suspect(self, names: Collection[str], marks: Mapping[str, Mark]) -> None:
        """These members are silent for part of their limit: ask them, and for contrast the first
        member that waits in a collective. ``marks``: of all members at work, in order of rank.
        """
        new = [name for name in marks if name in names and self._may(name, marks[name])]
        if not new:
            return
        others = (n for n, m in marks.items() if n not in names and m.phase == "collective")
        peers = tuple(name for name in others if self._may(name, marks[name]))[:1]
        asked = {*new[:MOST_ASKED], *peers}
        for name in (*new[:MOST_RECALLED], *peers):
            self._asked_s[name] = self._hands.now_s()
            if name in asked:
                self._hands.ask_stacks(name)
            self._numbers += 1
            sent = self._hands.send(name, Recall(number=self._numbers))
            self._asked[name] = _Asked(
                mark=marks[name],
                peers=() if name in peers else peers,
                number=self._numbers if sent else 0,
                told=name in asked,
            )
        for gone in self._asked_s.keys() - marks.keys():
            del self._asked_s[gone]
            self._recalled.pop(gone, None)

    def recalled(self, name: str, message: Recalled) -> None:
        """A process says which collectives it stands in."""
        if name in self._asked_s:
            self._recalled[name] = message

    def named(self, hang: Hang, marks: Mapping[str, Mark]) -> Hang:
        """A hang of all, as that of the one that has not begun what others wait in; as it is, where
        their answers do not tell. ``marks``: of all members at work, now; who has moved since it
        was asked may have begun it.
        """
        still = {n: asked for n, asked in self._asked.items() if marks.get(n) == asked.mark}
        told = {name: said for name in still if (said := self._answer(name, still[name]))}
        found = absence(told)
        if found is None:
            return hang
        mark, name = marks[found.process], found.process
        self._asked[name] = replace(still[name], peers=found.waiting[:1], told=True)
        self._asked[found.waiting[0]] = replace(still[found.waiting[0]], told=True)
        return replace(
            hang,
            process=name,
            phase=mark.phase,
            step=mark.step,
            left_out=found.what,
            last_seq=mark.last_seq,
        )

    def _answer(self, name: str, asked: _Asked) -> Recalled | None:
        """What a process says to the last request."""
        said = self._recalled.get(name)
        return said if said is not None and asked.number and said.number == asked.number else None

    def _may(self, name: str, mark: Mark) -> bool:
        """Once for each silence, and not too often."""
        asked, last_s = self._asked.get(name), self._asked_s.get(name)
        if asked is not None and asked.mark == mark:
            return False
        return last_s is None or self._hands.now_s() >= last_s + EVERY_S

    def hung(self, blamed: str, mark: Mark) -> None:
        """A process is declared to hang: write down its stacks, and those of who was asked with it.
        ``mark``: its own now; if it has moved since it was asked, its answer is of another time.
        """
        asked = self._asked.pop(blamed, None)
        if asked is not None and asked.mark == mark:
            self._late[blamed] = (asked, self._hands.now_s() + LATE_S)
            self.look()
            for name in asked.peers:
                if (peer := self._asked.get(name)) is not None:
                    self._tell(name, "peer", peer)

    @property
    def awaited(self) -> bool:
        """Whether an answer of a process that was declared to hang is still to come."""
        return bool(self._late)

    def look(self) -> None:
        """Write down what those say now that had not answered when they were declared to hang: a
        stopped one is read from outside.
        """
        for name, (asked, until_s) in [*self._late.items()]:
            found = self._hands.stacks(name)
            if found is None or found[0] or self._hands.now_s() >= until_s:
                del self._late[name]
                self._write(name, "hung", asked, found)

    def stuck(self, marks: Mapping[str, Mark]) -> None:
        """No process can be blamed: write down what those say that have not moved since they were
        asked. ``marks``: of all members, now.
        """
        for name in [n for n, asked in self._asked.items() if marks.get(n) == asked.mark]:
            asked = self._asked.pop(name)
            if asked.told:
                self._tell(name, "stuck", asked)

    def _tell(self, name: str, role: str, asked: _Asked) -> None:
        self._write(name, role, asked, self._hands.stacks(name))

    def _write(self, name: str, role: str, asked: _Asked, found: tuple[str, str] | None) -> None:
        if found is not None:
            text, file = found
            self._hands.record(
                Kind.STACKS_DUMPED,
                process=name,
                role=role,
                answered=bool(text),
                frames=training_frames(text),
                file=file,
            )
        if asked.number:
            said = self._answer(name, asked)
            self._hands.record(
                Kind.COLLECTIVES_DUMPED,
                process=name,
                role=role,
                rank=said.rank if said else None,
                entries=[one.model_dump() for one in said.entries] if said else [],
                why=said.why if said else "it did not answer",
            )
