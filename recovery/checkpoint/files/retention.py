"""Which checkpoints of a directory stay, which go, and which are set aside because their state is
in doubt.

The newest few of the lineage stay, and so does the newest that the replicas are known to have
agreed on: a corruption may be older than all that were saved since, and then that one is the last
good one. A checkpoint that may hold a corrupted state is renamed, not deleted, and never restored;
the first few are kept for inspection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import TRASH, Checkpoint, Disk, Guard
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint
from trainchaos.recovery.transport.atomic_rename import remove

MOST_ASIDE = 3  # set-aside checkpoints that are kept in a directory
_ASIDE = re.compile(r"^doubtful-(step-(\d{8}))-\d+-\d+$")

Refused = Callable[[Checkpoint, str], None]
"""Called with a checkpoint that the disk failed to delete, and the reason; it stays whole, and is
tried again next time.
"""


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


def prune(
    directory: Path,
    keep: int,
    *,
    agreed: Agreement | None = None,
    recorded: Collection[str] = (),
    refused: Refused | None = None,
    stays: Callable[[Collection[str]], None] | None = None,
    disk: Disk | None = None,
    progress: Callable[[], None] | None = None,
    guard: Guard = nullcontext,
) -> list[Checkpoint]:
    """Delete all but the newest ``keep`` of the lineage, the newest that was ``agreed`` on (None:
    replicas are not compared) with the one to be agreed on next, and what those refer to; returns
    what was deleted.

    Nothing is deleted unless one that stays is good: named in ``recorded``, by the word of its
    writer, or else verified. Nothing is deleted either while the last agreement is unknown.
    ``stays``: called with the names of those that stay, before anything is deleted; ``progress``:
    while one is read, and after each file that is deleted. Raises what ``guard`` raises.
    """
    own, abandoned = checkpoints.by_lineage(directory)
    sound = [checkpoint for checkpoint in own if not checkpoints.is_refused(checkpoint)]
    rest = [checkpoint for checkpoint in own if checkpoint not in sound] + abandoned
    stay = [*sound, *rest][:keep]
    if agreed is not None:
        if agreed.step < 0:
            return []
        due = agreed.next_step([checkpoint.step for checkpoint in sound])
        vouched = [checkpoint for checkpoint in sound if checkpoint.step <= agreed.step][:1]
        stay += [*vouched, *(checkpoint for checkpoint in sound if checkpoint.step == due)]
    needed = {checkpoint.name for checkpoint in stay}.union(
        *(checkpoints.needed_by(c) for c in stay)
    )
    old = [checkpoint for checkpoint in (*own, *abandoned) if checkpoint.name not in needed]
    if not old or not any(_is_good(checkpoint, recorded, progress) for checkpoint in stay):
        return []
    if stays is not None:
        stays(needed - {""})
    return _delete(directory, old, refused=refused, disk=disk, guard=guard, progress=progress)


def set_aside(
    directory: Path,
    in_doubt: Callable[[Checkpoint], bool],
    *,
    refused: Refused | None = None,
    disk: Disk | None = None,
    guard: Guard = nullcontext,
    progress: Callable[[], None] | None = None,
) -> tuple[list[Checkpoint], list[str]]:
    """Rename the checkpoints that may hold a corrupted state: ``doubtful-step-...``. Returns them,
    oldest first, and the names of those that had been set aside and are deleted, because there are
    more than MOST_ASIDE: the first of the latest ones stay, as a corruption is more likely in what
    was saved later.
    """
    moved, new = list[Checkpoint](), list[str]()
    for checkpoint in sorted(checkpoints.newest_first(directory), key=lambda c: c.step):
        if not in_doubt(checkpoint):
            continue
        origin = checkpoints.origin_of(checkpoint) or checkpoints.Origin()
        aside = directory / f"doubtful-{checkpoint.name}-{origin.epoch}-{origin.generation}"
        try:
            (disk or _silent)("delete", checkpoint.path)
            remove(aside, progress)
            with guard():
                checkpoint.path.rename(aside)
        except OSError as error:
            if refused is not None:
                refused(checkpoint, checkpoints.first_line(error))
            continue
        moved.append(checkpoint)
        new.append(aside.name)
    earlier = [name for name in aside_in(directory) if name not in new]
    gone = [*new, *earlier][MOST_ASIDE:]
    for name in gone:
        remove(directory / name, progress)
    return moved, gone


def aside_in(directory: Path) -> list[str]:
    """Names of checkpoints that were set aside, oldest step first."""
    if not directory.is_dir():
        return []
    found = (_ASIDE.match(path.name) for path in directory.iterdir())
    return sorted(
        (match[0] for match in found if match), key=lambda name: (name.split("-")[2], name)
    )


def _delete(
    directory: Path,
    old: Sequence[Checkpoint],
    *,
    refused: Refused | None,
    disk: Disk | None,
    guard: Guard,
    progress: Callable[[], None] | None,
) -> list[Checkpoint]:
    gone = []
    for checkpoint in old:
        trash = directory / f"{TRASH}{checkpoint.name}"
        try:
            (disk or _silent)("delete", checkpoint.path)
            remove(trash, progress)
            with guard():
                checkpoint.path.rename(trash)  # so that a reader finds the whole checkpoint or none
        except OSError as error:
            if refused is not None:
                refused(checkpoint, checkpoints.first_line(error))
            continue
        gone.append(checkpoint)
        remove(trash, progress)
    return gone


def _is_good(
    checkpoint: Checkpoint, recorded: Collection[str], progress: Callable[[], None] | None
) -> bool:
    try:
        if checkpoint.name in recorded:
            checkpoints.manifest_of(checkpoint)  # its files are still there, whole
        else:
            checkpoints.verify(checkpoint, progress)
    except CorruptCheckpoint:
        return False
    return not checkpoints.is_refused(checkpoint)


def _silent(what: str, path: Path) -> None:
    """Ignores what the disk failed to delete."""
