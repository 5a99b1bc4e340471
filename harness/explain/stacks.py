"""The stacks of ranks that a log holds for a hang: where each stood when it was suspected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log

SHOWN = 4  # innermost frames of each process, in a report for people


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One process. ``role``: hung, peer or stuck (``chaos.events.kinds``); ``frames``: of its
    training thread, the innermost first; ``file``: beside the process's output, "": none.
    """

    process: str
    role: str
    answered: bool
    frames: tuple[str, ...]
    file: str

    @property
    def said(self) -> str:
        """For people."""
        who = f"{self.process} ({self.role})"
        if not self.answered:
            return f"{who} did not answer: it was stopped, or waited in the kernel"
        shown = " < ".join(_short(frame) for frame in self.frames[:SHOWN])
        return f"{who} in {shown or 'no Python code'}" + (f"; {self.file}" if self.file else "")


def stacks_between(log: Log, start_ns: float, end_ns: float) -> tuple[Stack, ...]:
    """Those of a time, in the order of the log."""
    return tuple(
        Stack(
            process=str(event.data["process"]),
            role=str(event.data["role"]),
            answered=bool(event.data["answered"]),
            frames=_texts(event.data["frames"]),
            file=str(event.data["file"]),
        )
        for event in log.of(Kind.STACKS_DUMPED)
        if start_ns <= event.time_ns <= end_ns
    )


def _texts(found: object) -> tuple[str, ...]:
    return tuple(map(str, found)) if isinstance(found, list | tuple) else ()


def _short(frame: str) -> str:
    """A frame with its file's last folder only: ``rank/step.py:178 in backward``."""
    path, _, rest = frame.rpartition(":")
    return f"{'/'.join(PurePath(path).parts[-2:])}:{rest}" if path else frame
