"""Asks ranks for their stacks, and for the collectives they stand in, and NCCL's RAS for who lags,
while they are only suspected to hang, so that the answers are there when the limit is over, and the
answer to a hang waits for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.detection.hangs import Hang
from trainchaos.recovery.detection.ras import Behind
from trainchaos.recovery.detection.ras_watch import RasWatch
from trainchaos.recovery.process.host import Hands
from trainchaos.recovery.process.stacks import training_frames
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import CollectiveEntry, Recall, Recalled

EVERY_S = 10.0
"""Shortest time between two requests to one process: a dump takes it about a millisecond, and a
rank that is often late must not pay for it with each step.
"""
LATE_S = 0.6
"""For what is seen of a process from outside after it was declared to hang: twice as long as its
end is put off (``recovery.process.local``).
"""
MOST_ASKED = 4
"""Processes asked for their stacks at one moment: in a stall of all ranks a few tell where they
stand.
"""
MOST_RECALLED = 1024
"""And for their collectives: who has left one out is found only among those that are asked."""


MOST_SAID = 2  # sentences of RAS about one process
DONE = "done"


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

    def __init__(self, hands: Hands, ras: RasWatch | None = None) -> None:
        self._hands = hands
        self._ras = ras or RasWatch()
        self._ras_asked: dict[str, tuple[int, Mark]] = {}  # the last time: pid, and mark then
        self._ras_due = False  # its answer is to be written
        self._asked: dict[str, _Asked] = {}
        self._asked_s: dict[str, float] = {}
        self._numbers = 0
        self._late: dict[str, tuple[_Asked, float]] = {}  # declared to hang, and until when
        self._recalled: dict[str, Recalled] = {}  # the last answer of each that was asked

    def suspect(self, names: Collection[str], marks: Mapping[str, Mark]) -> None:
        """These members are silent for part of their limit: ask them, and for contrast the first
        member that waits in a collective. ``marks``: of all members at work, in order of rank.
        """
        if names:
            self._ask_ras(names, marks)
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

    def _ask_ras(self, names: Collection[str], marks: Mapping[str, Mark]) -> None:
        """Once for each silence: what it says of the processes of this machine. It knows the pids
        of others too, but not whose they are.
        """
        if not self._ras.may_ask(self._hands.now_s()):
            return
        if all((asked := self._ras_asked.get(n)) and asked[1] == marks.get(n) for n in names):
            return
        pids = {name: self._hands.pid(name) for name in marks}
        self._ras_asked = {n: (pid, marks[n]) for n, pid in pids.items() if pid is not None}
        self._ras_due = False
        here = {pid: name for name, (pid, _) in self._ras_asked.items()}
        self._ras.ask(here, self._hands.now_s())

    def recalled(self, name: str, message: Recalled) -> None:
        """A process says which collectives it stands in."""
        if name in self._asked_s:
            self._recalled[name] = message

    def named(self, hang: Hang, marks: Mapping[str, Mark]) -> Hang:
        """A hang of all, as that of the one that has not begun what others wait in; as it is, where
        neither their answers nor RAS tell. One of a process, with what RAS says of it. ``marks``:
        of all members at work, now; who has moved since it was asked may have begun it.
        """
        if hang.process:
            return self._seen_by_ras(hang, marks)
        still = {n: asked for n, asked in self._asked.items() if marks.get(n) == asked.mark}
        told = {name: said for name in still if (said := self._answer(name, still[name]))}
        found = absence(told)
        if found is None:
            return self._named_by_ras(hang, marks)
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

    def _named_by_ras(self, hang: Hang, marks: Mapping[str, Mark]) -> Hang:
        """A hang of all, as that of the one process that is missing or behind by RAS, if that has
        not moved since.
        """
        found = self._ras.found
        culprit = found.culprit if found is not None else None
        for name, (pid, mark) in self._ras_asked.items():
            if found is None or pid != culprit or marks.get(name) != mark:
                continue
            if (asked := self._asked.get(name)) is not None:
                self._asked[name] = replace(asked, told=True)
            first = found.about(pid)[0]
            return replace(
                hang,
                process=name,
                phase=mark.phase,
                step=mark.step,
                left_out=first.awaited if isinstance(first, Behind) else "",
                last_seq=mark.last_seq,
                ras=str(first),
            )
        return hang

    def _seen_by_ras(self, hang: Hang, marks: Mapping[str, Mark]) -> Hang:
        """With what RAS says of its process, if that has not moved since."""
        asked, found = self._ras_asked.get(hang.process), self._ras.found
        if found is None or asked is None or marks.get(hang.process) != asked[1]:
            return hang
        said = found.about(asked[0])
        return replace(hang, ras=str(said[0])) if said else hang

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
        self._ras_due = self._ras_asked.get(blamed, (0, None))[1] == mark
        asked = self._asked.pop(blamed, None)
        if asked is not None and asked.mark == mark:
            self._late[blamed] = (asked, self._hands.now_s() + LATE_S)
            self.look()
            for name in asked.peers:
                if (peer := self._asked.get(name)) is not None:
                    self._tell(name, "peer", peer)
        self._tell_ras()

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
        self._tell_ras()

    def stuck(self, marks: Mapping[str, Mark]) -> None:
        """No process can be blamed: write down what those say that have not moved since they were
        asked. ``marks``: of all members, now.
        """
        for name in [n for n, asked in self._asked.items() if marks.get(n) == asked.mark]:
            asked = self._asked.pop(name)
            if asked.told:
                self._tell(name, "stuck", asked)
        self._ras_due = any(marks.get(n) == mark for n, (_, mark) in self._ras_asked.items())
        self._tell_ras()

    def _tell_ras(self) -> None:
        """After a hang was declared: write down what RAS says of who is missing or behind, as soon
        as it is there. A stopped process is missing after two seconds only.
        """
        if not self._ras_due or self._ras.under_way:
            return
        self._ras_due, found = False, self._ras.found
        if found is None:
            return
        said = {name: found.about(pid) for name, (pid, _) in self._ras_asked.items()}
        for name in [name for name, about in said.items() if about][:MOST_ASKED]:
            why = "; ".join(map(str, said[name][:MOST_SAID]))
            self._hands.record(
                Kind.COLLECTIVES_DUMPED, process=name, role="ras", rank=None, entries=[], why=why
            )

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
                entries=[structs.asdict(one) for one in said.entries] if said else [],
                why=said.why if said else "it did not answer",
            )


@dataclass(frozen=True, kw_only=True)
class Absence:
    """``process`` has not begun ``awaited``, in which ``waiting`` stand."""

    process: str
    awaited: CollectiveEntry
    waiting: tuple[str, ...]

    @property
    def what(self) -> str:
        """For people: such as ``all_reduce 24 of shard-1``."""
        one = self.awaited
        return f"{one.op or 'collective'} {one.seq} of {one.group.partition('/')[2] or 'all ranks'}"


def absence(said: Mapping[str, Recalled]) -> Absence | None:
    """The one process that others wait for in a collective, and that has itself begun nothing that
    is not done. None: there is no such process, or there are several. ``said``: the answer of each
    process, of one moment.

    Who waits in an operation of its own, with one other rank (which torch does not record for gloo)
    or with several, may only be kept by a third. A rank that never had a part in a group is not
    known to be one of it, and one that does not say what it has begun is not blamed.
    """
    newest = {name: _newest(one) for name, one in said.items()}
    idle = {name for name, one in said.items() if one.begun == 0}
    found: dict[str, Absence] = {}
    for name, entry in _standing(said):
        for other in idle:
            if newest[other].get(entry.group, entry.seq) < entry.seq:
                before = found.get(other)
                waiting = (*(before.waiting if before else ()), name)
                awaited = before.awaited if before else entry
                found[other] = Absence(process=other, awaited=awaited, waiting=waiting)
    return next(iter(found.values())) if len(found) == 1 else None


def _newest(said: Recalled) -> dict[str, int]:
    """Group -> number of the last collective that was begun in it."""
    newest: dict[str, int] = {}
    for entry in said.entries:
        newest[entry.group] = max(entry.seq, newest.get(entry.group, entry.seq))
    return newest


def _standing(said: Mapping[str, Recalled]) -> Iterator[tuple[str, CollectiveEntry]]:
    """Each process with the first collective of each group that it has begun and is not done."""
    for name, one in said.items():
        first: dict[str, CollectiveEntry] = {}
        for entry in one.entries:
            if entry.state != DONE and entry.seq <= first.get(entry.group, entry).seq:
                first[entry.group] = entry
        for entry in first.values():
            yield name, entry
