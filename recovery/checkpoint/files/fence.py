"""Which process may write in a checkpoint directory: one of the newest generation of the job that
was started last.

The right is a file, ``fence.json``: the epoch (a number that each new job in the directory counts
up), the generation, the job, and the jobs before it. Rank 0 of a generation takes it before the
group forms. A rank that saves compares it before the first byte; and each rename and each deletion
is done with a lock held (``flock``, which NFS passes on to its server), after one more check, so
that a newer writer that holds the lock knows that nothing of an older one follows. Where a file
system has no locks, the checks alone have to do.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from trainchaos.chaos.errors import EXIT_FAIL, ChaosError
from trainchaos.recovery.checkpoint.files import checkpoints

FENCE, LOCK = "fence.json", ".fence.lock"
LOCK_LIMIT_S = 2.0  # a writer that holds the lock for longer has stalled
LOOK_S = 0.002
MOST_PAST = 64  # jobs before this one that are remembered
_LEFT = "this process has left its generation"


class Fenced(ChaosError):
    """A newer writer uses the checkpoint directory."""

    exit_code = EXIT_FAIL


class WriteRight(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file. ``past``: jobs whose right is over."""

    epoch: int
    generation: int
    job: str
    past: tuple[str, ...] = ()


class CheckpointFence:
    """The right of one process. ``job``: the same for all processes of a job, "" for a job without
    a name, which is taken for a new one whenever its generation is not newer.

    Used by the training thread; ``held`` is also used by the thread that saves.
    """

    def __init__(self, directory: Path, job: str) -> None:
        self.directory = directory
        self._job = job
        self._mine: WriteRight | None = None
        self._changed = threading.Condition()
        self.suspended = False  # it has left its generation, and has not joined another one yet
        self.tenure = 0  # counts how often this process stopped writing

    @property
    def epoch(self) -> int | None:
        """Epoch of this job; None: unknown, as the right could not be taken or read."""
        return self._mine.epoch if self._mine is not None else None

    def take(self, generation: int) -> None:
        """Become the writer. Raises Fenced when a newer writer exists, and OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._locked(patient=False):
            now = self._read()
            self._refuse_if_past(now, generation)
            past = now.past if now is not None else ()
            if now is None:
                epoch = 1 + self._newest_epoch()
            elif now.job == self._job and (self._job or now.generation < generation):
                epoch = now.epoch
            else:
                epoch = now.epoch + 1
                past = (*past, *([now.job] if now.job else []))[-MOST_PAST:]
            mine = WriteRight(epoch=epoch, generation=generation, job=self._job, past=past)
            self._write(mine)
        self._have(mine)

    def enter(self, generation: int, *, takes: bool) -> int:
        """Called before the first byte of a save, by the rank that ``takes`` the right for all or
        by one that writes a part for it; returns the epoch. A directory that somebody has removed
        is made again, if its parent is there. Raises Fenced when a newer writer has the right, and
        OSError, also while no rank of this generation has taken it.
        """
        mine = self._mine
        if takes:
            with suppress(OSError):
                self.directory.mkdir(exist_ok=True)
        if mine is not None and mine.generation >= generation:
            self._check()
        elif self.suspended:
            raise Fenced(_LEFT)
        elif takes:
            self.take(generation)
        else:
            now = self._read()
            self._refuse_if_past(now, generation)
            if now is None or now.generation != generation or now.job != self._job:
                raise OSError(
                    f"rank 0 of generation {generation} has not taken {self.directory / FENCE}"
                )
            self._have(now)
        return self.epoch or 0

    def look(self, generation: int) -> None:
        """Raise Fenced when a newer writer exists; all other cases pass."""
        with suppress(OSError):
            now, mine = self._read(), self._mine
            self._refuse_if_past(now, generation)
            if now is not None and mine is not None and now.epoch > mine.epoch:
                raise self._refusal(now, generation)

    def suspend(self) -> None:
        """This process has left its generation: it renames and deletes nothing from now on, until
        it has taken the right again (a pending rename waits for that) or given up.
        """
        with self._changed:
            self.suspended = True

    def give_up(self) -> None:
        """Stop writing, pending renames included, until this process takes the right anew."""
        with self._changed:
            self.tenure += 1
        self._have(None)

    @contextmanager
    def held(
        self,
        *,
        tenure: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Hold the right for as long as the block lasts. ``tenure``: when the files to be renamed
        were begun, None: now; ``check``: given, it waits while the right is suspended, with calls
        of it, which may raise. Raises Fenced, and OSError when the lock cannot be acquired.
        """
        while True:
            with self._locked(patient=True), self._changed:
                if tenure not in (None, self.tenure):
                    raise Fenced(_LEFT)
                if not self.suspended:
                    self._check()
                    yield
                    return
            if check is None:
                raise Fenced(_LEFT)
            with self._changed:
                self._changed.wait_for(lambda: not self.suspended, timeout=0.05)
            check()

    def _check(self) -> None:
        mine = self._mine
        if mine is None:
            raise Fenced(_LEFT)
        now = self._read()
        if now is None:  # the file was deleted by a user or tool
            self._write(mine)
        elif (now.epoch, now.generation, now.job) != (mine.epoch, mine.generation, mine.job):
            raise self._refusal(now, mine.generation)

    def _have(self, mine: WriteRight | None) -> None:
        with self._changed:
            self._mine, self.suspended = mine, False
            self._changed.notify_all()

    def _refuse_if_past(self, now: WriteRight | None, generation: int) -> None:
        if now is None or not self._job:
            return
        if self._job in now.past or (now.job == self._job and now.generation > generation):
            raise self._refusal(now, generation)

    def _refusal(self, now: WriteRight, generation: int) -> Fenced:
        who = "another job" if now.job != self._job else f"generation {now.generation}"
        return Fenced(
            f"{who} writes checkpoints in {self.directory} now, generation {generation} may not",
            hint="give each job a checkpoint directory of its own, or end the one that is over",
        )

    def _newest_epoch(self) -> int:
        origins = map(checkpoints.origin_of, checkpoints.newest_first(self.directory))
        return max((origin.epoch for origin in origins if origin is not None), default=0)

    def _read(self) -> WriteRight | None:
        """None: the file is missing, or is not a fence file."""
        try:
            return msgspec.json.decode((self.directory / FENCE).read_bytes(), type=WriteRight)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _write(self, right: WriteRight) -> None:
        """Write the file whole or not at all. It is not synced: after a loss of power no older
        writer is left.
        """
        hidden = self.directory / f".fence-{os.getpid()}-{threading.get_ident()}"
        try:
            hidden.write_bytes(msgspec.json.encode(right))
            hidden.rename(self.directory / FENCE)
        finally:
            hidden.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, *, patient: bool) -> Iterator[None]:
        """``patient``: raise TimeoutError when another process holds the lock for LOCK_LIMIT_S;
        else continue without it, since such a process has stalled and has to be fenced.
        """
        fd = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
                            f"{self.directory / LOCK} is held by somebody else"
                        ) from None
                    time.sleep(LOOK_S)
                except OSError:
                    break  # a file system without locks
            yield
        finally:
            os.close(fd)
