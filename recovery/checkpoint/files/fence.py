"""Who may write in a checkpoint directory: the newest generation of the job that was started last,
nobody before.

The right is a file, ``fence.json``: the epoch (a number that each new job in the directory counts
up), the generation, the job, and the jobs before it. Rank 0 of a generation takes it before the
group forms. Whoever saves compares it before the first byte; and each rename and each deletion is
done with a lock held (``flock``, which NFS passes on to its server), after one more look, so that a
newer writer that has it knows that nothing of an older one follows. Where a file system has no
locks, the looks alone have to do.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chaos.errors import EXIT_FAIL, ChaosError
from recovery.checkpoint.files import checkpoints

FENCE, LOCK = "fence.json", ".fence.lock"
LOCK_LIMIT_S = 2.0  # a writer that holds the lock for longer stands still
LOOK_S = 0.002
MOST_PAST = 64  # jobs before this one that are remembered


class Fenced(ChaosError):
    """Somebody newer writes in the checkpoint directory."""

    exit_code = EXIT_FAIL


@dataclass(frozen=True, kw_only=True)
class Right:
    """What the file says. ``past``: jobs whose right is over."""

    epoch: int
    generation: int
    job: str
    past: tuple[str, ...] = ()


class Fence:
    """The right of one process. ``job``: the same for all processes of a job, "" for one that has
    no name, which is taken for a new one whenever its generation is not newer.

    Used by the training thread, and ``held`` by the thread that saves too.
    """

    def __init__(self, directory: Path, job: str) -> None:
        self._directory = directory
        self._job = job
        self._mine: Right | None = None
        self._changed = threading.Condition()
        self._suspended = False
        self.tenure = 0  # counts how often this process gave up writing

    @property
    def epoch(self) -> int | None:
        """Of this job; None: not known, as the right could not be taken or seen."""
        return self._mine.epoch if self._mine is not None else None

    @property
    def suspended(self) -> bool:
        """Whether this process has left its generation, and is in no other yet."""
        return self._suspended

    def take(self, generation: int) -> None:
        """Become the one who writes. Raises Fenced when somebody newer does, and OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._locked(patient=False):
            now = self._read()
            self._refuse_if_past(now, generation)
            if now is None:
                mine = Right(epoch=1 + self._newest_epoch(), generation=generation, job=self._job)
            elif now.job == self._job and (self._job or now.generation < generation):
                mine = Right(epoch=now.epoch, generation=generation, job=now.job, past=now.past)
            else:
                past = (*now.past, *([now.job] if now.job else []))[-MOST_PAST:]
                mine = Right(epoch=now.epoch + 1, generation=generation, job=self._job, past=past)
            self._write(mine)
        self._have(mine)

    def see(self, generation: int) -> None:
        """Write a part for whoever has taken it in this generation. Raises Fenced when somebody
        newer has, OSError when nobody has.
        """
        now = self._read()
        self._refuse_if_past(now, generation)
        if now is None or now.generation != generation or now.job != self._job:
            raise OSError(
                f"rank 0 of generation {generation} has not taken {self._directory / FENCE}"
            )
        self._have(now)

    def enter(self, generation: int, *, takes: bool) -> int:
        """Before the first byte of a save, by whoever ``takes`` the right for all or writes a part:
        returns the epoch. Raises what ``take`` and ``see`` do.
        """
        mine = self._mine
        if mine is not None and mine.generation >= generation:
            self._check()
        elif self._suspended:
            raise Fenced("this process has left its generation")
        elif takes:
            self.take(generation)
        else:
            self.see(generation)
        return self.epoch or 0

    def look(self, generation: int) -> None:
        """Raise Fenced when somebody newer writes; nothing else is told apart, nor done."""
        with suppress(OSError):
            now, mine = self._read(), self._mine
            self._refuse_if_past(now, generation)
            if now is not None and mine is not None and now.epoch > mine.epoch:
                raise self._refusal(now, generation)

    def suspend(self) -> None:
        """This process has left its generation: nothing of it is renamed or deleted from now on,
        until it has taken the right again (what it was about to put in place waits for that) or
        given up.
        """
        with self._changed:
            self._suspended = True

    def give_up(self) -> None:
        """This process writes no more, what waits included, until it takes the right anew."""
        with self._changed:
            self.tenure += 1
        self._have(None)

    @contextmanager
    def held(
        self,
        *,
        tenure: int | None = None,
        waits: bool = False,
        check: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Have the right for as long as the block lasts. ``tenure``: when what is to be renamed was
        begun, None: now; ``waits``: while it is suspended, with calls of ``check``, which may
        raise. Raises Fenced, and OSError when the lock cannot be had.
        """
        while True:
            with self._locked(patient=True), self._changed:
                if tenure not in (None, self.tenure):
                    raise Fenced("this process has left its generation")
                if not self._suspended:
                    self._check()
                    yield
                    return
            if not waits:
                raise Fenced("this process has left its generation")
            with self._changed:
                self._changed.wait_for(lambda: not self._suspended, timeout=0.05)
            if check is not None:
                check()

    def _check(self) -> None:
        mine = self._mine
        if mine is None:
            raise Fenced("this process may not write checkpoints: it has left its generation")
        now = self._read()
        if now is None:  # somebody cleaned up
            self._write(mine)
        elif (now.epoch, now.generation, now.job) != (mine.epoch, mine.generation, mine.job):
            raise self._refusal(now, mine.generation)

    def _have(self, mine: Right | None) -> None:
        with self._changed:
            self._mine, self._suspended = mine, False
            self._changed.notify_all()

    def _refuse_if_past(self, now: Right | None, generation: int) -> None:
        if now is None or not self._job:
            return
        if self._job in now.past or (now.job == self._job and now.generation > generation):
            raise self._refusal(now, generation)

    def _refusal(self, now: Right, generation: int) -> Fenced:
        who = "another job" if now.job != self._job else f"generation {now.generation}"
        return Fenced(
            f"{who} writes checkpoints in {self._directory} now, generation {generation} may not",
            hint="give each job a checkpoint directory of its own, or end the one that is over",
        )

    def _newest_epoch(self) -> int:
        origins = map(checkpoints.origin_of, checkpoints.newest_first(self._directory))
        return max((origin.epoch for origin in origins if origin is not None), default=0)

    def _read(self) -> Right | None:
        """None: it is not there, or is no such file."""
        try:
            raw = json.loads((self._directory / FENCE).read_bytes())
            past = tuple(str(job) for job in raw["past"])
            return Right(
                epoch=int(raw["epoch"]),
                generation=int(raw["generation"]),
                job=str(raw["job"]),
                past=past,
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return None

    def _write(self, right: Right) -> None:
        """Whole or not at all. It is not synced: after a loss of power nobody older is left to
        write.
        """
        told = {
            "epoch": right.epoch,
            "generation": right.generation,
            "job": right.job,
            "past": list(right.past),
        }
        hidden = self._directory / f".fence-{os.getpid()}-{threading.get_ident()}"
        try:
            hidden.write_text(json.dumps(told))
            hidden.rename(self._directory / FENCE)
        finally:
            hidden.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, *, patient: bool) -> Iterator[None]:
        """``patient``: raise TimeoutError when somebody else holds the lock for LOCK_LIMIT_S; else
        go on without it, as whoever does that stands still and has to be fenced.
        """
        fd = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline_s = time.monotonic() + LOCK_LIMIT_S
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        if not patient:
                            break
                        raise TimeoutError(
                            f"{self._directory / LOCK} is held by somebody else"
                        ) from None
                    time.sleep(LOOK_S)
                except OSError:
                    break  # no locks here
            yield
        finally:
            os.close(fd)
