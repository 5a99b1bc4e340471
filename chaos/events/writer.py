"""Appends one actor's events to its file, line by line."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainchaos.chaos import disk
from trainchaos.chaos.errors import DISK_TAKES_NOTHING, LogError
from trainchaos.chaos.events.event import Event, require_keys
from trainchaos.chaos.events.kinds import Kind


class EventWriter:
    """Appends one actor's events to ``directory/<actor>.jsonl``; thread-safe. ``after``: the events
    left there by an earlier writer, to go on after (of ``read_actor``); a torn last line is cut
    off. ``reserve``: bytes to reserve for this file, if the file system can: they take its lines
    when the disk is full.

    Raises LogError if the file exists already (one writer per actor), or if there is nothing to
    continue.
    """

    _closed = False
    _dropped: tuple[int, str] | None = None
    """Number of the first dropped event not yet reported by a line, and why it was dropped."""

    def __init__(
        self,
        directory: Path,
        actor: str,
        clock_ns: Callable[[], int],
        *,
        after: Sequence[Event] | None = None,
        reserve: int = 0,
    ) -> None:
        self.actor = actor
        self.last_seq = after[-1].seq if after else -1
        self.generation = 0
        self._one = threading.Lock()  # a checkpoint saved in the background writes events too
        self._clock_ns = clock_ns
        self._path = directory / f"{actor}.jsonl"
        self._reserve, self._reserved = reserve, 0
        self._fd = -1
        self._open(new=after is None)
        if after is not None:
            os.ftruncate(self._fd, self._path.read_bytes().rfind(b"\n") + 1)

    def write(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Append one event and return it. ``generation`` defaults to the writer's current one. If
        it cannot be written, the event keeps its number and is dropped.
        """
        require_keys(kind, data)
        with self._one:
            if self._dropped is not None:
                first, why = self._dropped
                said = {"first": first, "last": self.last_seq, "why": why}
                if not self._refused(self._event(Kind.EVENTS_DROPPED, None, None, said)):
                    self._dropped = None
                    self.last_seq += 1
            event = self._event(kind, step, generation, data)
            if self._dropped is None and (why := self._refused(event)):
                self._dropped = event.seq, why
            self.last_seq = event.seq
        return event

    def _event(
        self, kind: Kind, step: int | None, generation: int | None, data: Mapping[str, Any]
    ) -> Event:
        return Event(
            kind=kind,
            actor=self.actor,
            seq=self.last_seq + 1,
            time_ns=self._clock_ns(),
            generation=self.generation if generation is None else generation,
            step=step,
            data=data,
        )

    def _refused(self, event: Event) -> str:
        """Why the line could not be written; empty: it was written."""
        try:
            self._put((event.to_line() + "\n").encode())
        except OSError as error:
            return error.strerror or type(error).__name__
        return ""

    def _put(self, line: bytes) -> None:
        """Write a whole line; a subclass may write it elsewhere first. Raises OSError, in which
        case nothing is written.
        """
        self._ensure_open()
        size = os.fstat(self._fd).st_size if self._reserve else 0
        if self._reserve and size + self._reserve // 2 >= self._reserved:
            self._reserved = size + self._reserve
            disk.reserve(self._fd, size, self._reserve)
        written = os.write(self._fd, line)
        if written != len(line):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise disk.full()

    def _ensure_open(self) -> None:
        """Open the file if that failed before. Raises OSError after ``close``, and while the disk
        is full.
        """
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._fd < 0:
            self._open(new=True)
        if self._fd < 0:
            raise disk.full()

    def _open(self, *, new: bool) -> None:
        """Raises LogError; on a full or failing disk the file is created later."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0)
        try:
            self._fd = os.open(self._path, flags, 0o644)
        except OSError as error:
            if new and error.errno in DISK_TAKES_NOTHING:
                return
            raise LogError(
                f"cannot {'create' if new else 'go on with'} event log {self._path}:"
                f" {error.strerror}"
            ) from error

    def abandon(self) -> None:
        """Close the file without an end mark, as the kernel does for a killed process."""
        self._closed = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Write the end mark and close the file; later calls do nothing."""
        if not self._closed:
            try:
                self.write(Kind.ACTOR_ENDED)
            finally:
                self.abandon()
