"""Which checkpoints of a directory stay, which go, and which are set aside because their state is
in doubt.

The newest few of the lineage stay, and so does the newest that the replicas are known to have
agreed on: a corruption may be older than all that were saved since, and then that one is the last
good one. A checkpoint that may hold a corrupted state is renamed, not deleted, and never restored;
the first few are kept for inspection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import (
    FREE,
    TRASH,
    Checkpoint,
    CorruptCheckpoint,
    Hand,
    Progress,
)
from trainchaos.recovery.checkpoint.files.fence import Fenced
from trainchaos.recovery.transport.atomic_rename import remove

MOST_ASIDE = 3  # set-aside checkpoints that are kept in a directory
_ASIDE = re.compile(r"^doubtful-(step-(\d{8}))-\d+-\d+$")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What is known of the comparison of replicas. ``step``: the last at which all were the same,
    -1: not known; ``every``: they are compared at multiples of it, None: with each checkpoint.
    """

    step: int
    every: int | None = None

    def next_step(self, steps: Collection[int]) -> int | None:
        """Of these steps of checkpoints, the one that the next agreement will vouch for."""
        later = sorted(step for step in steps if step > self.step)
        if self.every is None:
            return later[0] if later else None
        due = (self.step // self.every + 1) * self.every
        return max((step for step in later if step <= due), default=later[0] if later else None)


@dataclass(kw_only=True)
class Cleared:
    """What retention did. ``moved``: set aside, oldest first; ``gone``: deleted; ``gone_aside``:
    names of those that had been set aside and are deleted; ``left``: names of those that are to
    stay; ``kept``: (checkpoint, reason) of those that the disk failed to delete or rename, which
    stay whole and are tried again next time; None for all.
    """

    moved: list[Checkpoint] = field(default_factory=list)
    gone: list[Checkpoint] = field(default_factory=list)
    gone_aside: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    kept: list[tuple[Checkpoint | None, str]] = field(default_factory=list)


def prune(
    directory: Path,
    keep: int,
    *,
    agreed: Agreement | None = None,
    recorded: Collection[str] = (),
    hand: Hand = FREE,
) -> Cleared:
    """Delete all but the newest ``keep`` of the lineage, the newest that was ``agreed`` on (None:
    replicas are not compared) with the one to be agreed on next, and what those refer to.

    Nothing is deleted unless one that stays is good: named in ``recorded``, by the word of its
    writer, or else verified. Nothing is deleted either while the last agreement is unknown, nor by
    a process that is fenced: then another one decides.
    """
    done = Cleared()
    try:
        stay, old = _split(directory, keep, agreed)
        if not old or not any(_is_good(one, recorded, hand.progress) for one in stay):
            return done
        done.left = sorted({checkpoint.name for checkpoint in stay}.union(*map(_needs, stay)))
        for checkpoint in old:
            trash = directory / f"{TRASH}{checkpoint.name}"
            if _renamed(checkpoint, trash, done, hand):
                done.gone.append(checkpoint)
                remove(trash, hand.progress)
    except Fenced:
        pass
    except OSError as error:
        done.kept.append((None, checkpoints.first_line(error)))
    return done


def _split(
    directory: Path, keep: int, agreed: Agreement | None
) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """Those that stay for their own sake, and those that nothing needs."""
    own, abandoned = checkpoints.by_lineage(directory)
    sound = [checkpoint for checkpoint in own if not checkpoints.is_refused(checkpoint)]
    rest = [checkpoint for checkpoint in own if checkpoint not in sound] + abandoned
    stay = [*sound, *rest][:keep]
    if agreed is not None:
        if agreed.step < 0:
            return [], []
        due = agreed.next_step([checkpoint.step for checkpoint in sound])
        vouched = [checkpoint for checkpoint in sound if checkpoint.step <= agreed.step][:1]
        stay += [*vouched, *(checkpoint for checkpoint in sound if checkpoint.step == due)]
    needed = {checkpoint.name for checkpoint in stay}.union(*map(_needs, stay))
    return stay, [checkpoint for checkpoint in (*own, *abandoned) if checkpoint.name not in needed]


def _needs(checkpoint: Checkpoint) -> frozenset[str]:
    return checkpoints.needed_by(checkpoint) - {""}


def _is_good(checkpoint: Checkpoint, recorded: Collection[str], progress: Progress) -> bool:
    try:
        if checkpoint.name in recorded:
            checkpoints.manifest_of(checkpoint)  # its files are still there, whole
        else:
            checkpoints.verify(checkpoint, progress)
    except CorruptCheckpoint:
        return False
    return not checkpoints.is_refused(checkpoint)


def set_aside(
    directory: Path,
    in_doubt: Callable[[Checkpoint], bool],
    *,
    hand: Hand = FREE,
) -> Cleared:
    """Rename the checkpoints that may hold a corrupted state: ``doubtful-step-...``. Of those that
    were set aside only MOST_ASIDE stay: the first of the latest ones, as a corruption is more
    likely in what was saved later. Raises what ``guard`` raises, but for OSError.
    """
    done, new = Cleared(), list[str]()
    for checkpoint in sorted(checkpoints.newest_first(directory), key=lambda c: c.step):
        if not in_doubt(checkpoint):
            continue
        origin = checkpoints.origin_of(checkpoint) or checkpoints.Origin()
        aside = directory / f"doubtful-{checkpoint.name}-{origin.epoch}-{origin.generation}"
        if _renamed(checkpoint, aside, done, hand):
            done.moved.append(checkpoint)
            new.append(aside.name)
    earlier = [name for name in aside_in(directory) if name not in new]
    done.gone_aside = [*new, *earlier][MOST_ASIDE:]
    for name in done.gone_aside:
        remove(directory / name, hand.progress)
    return done


def aside_in(directory: Path) -> list[str]:
    """Names of checkpoints that were set aside, oldest step first."""
    if not directory.is_dir():
        return []
    found = (_ASIDE.match(path.name) for path in directory.iterdir())
    return sorted(
        (match[0] for match in found if match), key=lambda name: (name.split("-")[2], name)
    )


def _renamed(checkpoint: Checkpoint, other: Path, done: Cleared, hand: Hand) -> bool:
    """Give it another name at once, so that a reader finds the whole checkpoint or none; a failure
    is noted.
    """
    try:
        hand.disk("delete", checkpoint.path)
        remove(other, hand.progress)
        with hand.guard():
            checkpoint.path.rename(other)
    except OSError as error:
        done.kept.append((checkpoint, checkpoints.first_line(error)))
        return False
    return True
