"""Errors meant for people: what went wrong, where, and what to do about it.

Each carries the exit code the command line returns. A dead rank is not an error; it is data in the
event log.
"""

from __future__ import annotations

import errno

EXIT_PASS = 0
EXIT_FAIL = 1
EXIT_USAGE = 2
EXIT_INCONCLUSIVE = 3
EXIT_HARNESS = 4
EXIT_UNSAFE = 5
EXIT_HALTED = 6
EXIT_SKIPPED = 7
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

DISK_TAKES_NOTHING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})


class ChaosError(Exception):
    """Base of all errors meant for people."""

    exit_code = EXIT_HARNESS

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class ScenarioError(ChaosError):
    """The scenario file is wrong; nothing was started."""

    exit_code = EXIT_USAGE


class InfrastructureError(ChaosError):
    """The harness or the machine failed (disk full, no port, a process that cannot start)."""

    exit_code = EXIT_HARNESS


class NoPlaceLeft(InfrastructureError):
    """No node is left on which a process of the job can start: the job cannot continue."""


class MissingCapability(ChaosError):
    """This machine or launcher lacks what the scenario requires; the run is skipped, never
    passed.
    """

    exit_code = EXIT_SKIPPED


class LogError(ChaosError):
    """An event log cannot be read or written as promised."""

    exit_code = EXIT_HARNESS


class NoRun(LogError):
    """The path is not a run directory."""

    exit_code = EXIT_USAGE


class DamagedRun(LogError):
    """A stored run that was named does not say what it was to do: its scenario cannot be read."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint or "restore that file, or name another run")


def newer(what: object, version: object, reads: int, *, written: str = "by") -> str:
    """What is said of a file of a newer version; everywhere the same."""
    return (
        f"{what} was written {written} a newer version ({version}; this one reads up to {reads}):"
        " upgrade trainchaos"
    )


class NewerVersion(ChaosError):
    """A stored file was written by a newer version: it may be whole, and is not understood."""

    exit_code = EXIT_USAGE

    def __init__(self, what: object, version: object, reads: int) -> None:
        super().__init__(newer(what, version, reads))
