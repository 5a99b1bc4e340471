"""The search of one process, whatever it searches: tries one case after the other, plays a find
again where plays differ, and makes it small.

Where no two plays are the same (``plays`` above 1), a find counts if it shows in at least two of
them. One that shows once is kept apart, for people: a race is a defect too, but then nothing can
show whether a smaller case still has it, or whether a change has fixed it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from trainchaos.harness.fuzz.draw.shrink import shrunk
from trainchaos.harness.fuzz.play.coverage import Coverage, Feature
from trainchaos.harness.fuzz.play.oracle import Find

Case = TypeVar("Case")
MOST_ONCE = 2
"""How often a find is investigated that did not show again before."""


@dataclass(frozen=True, kw_only=True)
class Tried(Generic[Case]):
    """What a case showed. ``case``: None, what was drawn was refused by the loader."""

    case: Case | None = None
    find: Find | None = None
    reached: Collection[Feature] = ()


@dataclass(frozen=True, kw_only=True)
class ShrunkFind(Generic[Case]):
    """A defect, with the smallest case that shows it. ``first``: the case drawn; ``steady``: it
    shows again; ``name``, ``text``: of the file that reproduces it.
    """

    find: Find
    case: Case
    first: Case
    name: str
    text: str
    steady: bool = True


class Subject(ABC, Generic[Case]):
    """What is searched for defects."""

    @abstractmethod
    def attempt(self, number: int) -> Tried[Case] | None:
        """Draw a case and try it, after ``number`` others; None: there was nothing to try yet."""

    @abstractmethod
    def shows(self, case: Case) -> Find | None:
        """What a case shows when it is tried again."""

    @abstractmethod
    def file(self, find: Find, case: Case) -> tuple[str, str]:
        """Name and text of the file that reproduces a find."""

    def keep(self, case: Case) -> None:
        """A case reached something new: others may be drawn near it."""

    def smaller(self, case: Case) -> Iterator[Case]:
        """Cases that are one step smaller, largest steps first."""
        return iter(())

    def described(self, find: Find, case: Case, how: str) -> Find:
        """A find with a text for people. ``how``: in how many of several plays it showed."""
        return find


@dataclass
class Search(Generic[Case]):
    """``until_s``: monotonic time after which nothing is made smaller; ``tell``: called with finds
    before they are made small, and with those seen once; ``plays``, ``needed``: of so many plays, a
    find must show in so many; ``most_smaller``: smaller cases that are tried. ``runs``: cases
    tried, ``refused``: by the loader; ``finds``: by key; ``once``: find -> how often it did not
    show again.
    """

    subject: Subject[Case]
    until_s: float = math.inf
    tell: Callable[[ShrunkFind[Case]], None] = lambda found: None
    plays: int = 1
    needed: int = 1
    most_smaller: int = 150
    coverage: Coverage = field(default_factory=Coverage)
    finds: dict[str, ShrunkFind[Case]] = field(default_factory=dict)
    once: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    refused: int = 0

    def step(self) -> ShrunkFind[Case] | None:
        """One try; returns its find, if that is new."""
        tried = self.subject.attempt(self.runs)
        if tried is None or tried.case is None:
            self.refused += tried is not None
            return None
        self.runs += 1
        if self.coverage.add(tried.reached):
            self.subject.keep(tried.case)
        find = tried.find
        if find is None or find.key in self.finds or self.once[find.key] >= MOST_ONCE:
            return None
        return self._confirmed(find, tried.case)

    def _confirmed(self, find: Find, case: Case) -> ShrunkFind[Case] | None:
        """The find that shows often enough in all plays of a case."""
        seen, times, plays = {find.key: find}, Counter({find.key: 1}), 1
        try:
            while plays < self.plays and max(times.values()) < self.needed:
                plays += 1
                if (again := self.subject.shows(case)) is not None:
                    seen.setdefault(again.key, again)
                    times[again.key] += 1
        except BaseException:  # interrupted: still write down what was seen
            self._tell_once(find, case, plays)
            raise
        ((key, most), *_) = times.most_common()
        if key in self.finds:
            return None
        if most < self.needed:
            self.once[find.key] += 1
            self._tell_once(find, case, plays)
            return None
        found = self._found(seen[key], case, case, f"{most} of {plays} plays")
        self.finds[key] = found
        self.tell(found)
        return self._made_small(found)

    def _made_small(self, found: ShrunkFind[Case]) -> ShrunkFind[Case]:
        shown = [found.find]

        def shows(case: Case) -> bool:
            find = self.subject.shows(case) if time.monotonic() < self.until_s else None
            if find is None or find.key != found.find.key:
                return False
            shown.append(find)
            return True

        small, _ = shrunk(found.case, shows, self.subject.smaller, self.most_smaller)
        again = self.plays == 1 or any(shows(small) for _ in range(self.plays - 1))
        if len(shown) > 1 and again:
            how = f"{self.needed} of {self.plays} plays"
            found = self._found(shown[-1], small, found.case, how)
            self.finds[found.find.key] = found
        return found

    def _tell_once(self, find: Find, case: Case, plays: int) -> None:
        found = self._found(find, case, case, f"seen once in {plays}")
        self.tell(replace(found, steady=False))

    def _found(self, find: Find, case: Case, first: Case, how: str) -> ShrunkFind[Case]:
        find = self.subject.described(find, case, how)
        name, text = self.subject.file(find, case)
        return ShrunkFind(find=find, case=case, first=first, name=name, text=text)
