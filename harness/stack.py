"""What a recovery stack is to a comparison: pinned software, and a command line that trains the common job under it.

Every stack, ours included, is started as a program from outside (``workload: {command: ...}``), reports its steps by
``chaos.beacon``, and has its faults done to it by the same injector, so that the same observers measure all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

Settings = Literal["default", "tuned"]
HERE = "this"
"""The environment of chaos itself: no other is needed."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """An environment of its own. ``pins``: as pip takes them, exact; ``without_dependencies``: pins to install with
    ``--no-deps``; ``python``: versions it works with, as a specifier; ``probe``: a module whose import shows that it is
    ready."""

    pins: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    python: str = ">=3.11"
    probe: str = ""


@dataclass(frozen=True, kw_only=True)
class CommonJob:
    """What every stack trains: gpt of ``size`` on the corpus at ``data``, the same samples in each step for the same
    seed, AdamW with the built-in workload's settings, a checkpoint each ``every`` steps below ``$CHAOS_SCRATCH``."""

    size: str
    ranks: int
    steps: int
    global_batch: int
    every: int
    seed: int
    data: Path


@dataclass(frozen=True, kw_only=True)
class Drive:
    """How to start it: ``argv`` (``$CHAOS_...`` is replaced), ``env``; ``restarts``: how often whoever runs it may
    start the command again when it ends abnormally, as a cluster does."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0


class Stack:
    """Base of a stack. One instance a setting."""

    title: ClassVar[str] = ""
    ours: ClassVar[bool] = False
    requirements: ClassVar[Requirements | None] = None
    """None: what chaos itself has."""
    tuned_because: ClassVar[str] = ""
    """Where its documentation recommends what ``tuned`` chooses, and why."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def chosen(self) -> Mapping[str, object]:
        """The options of the stack that these settings set, by their own names; what is not here is its default."""

    @abstractmethod
    def drive(self, job: CommonJob, python: Path) -> Drive:
        """The command. ``python``: interpreter of the stack's environment."""

    def not_offered(self, family: str) -> str | None:
        """Why this stack cannot be put under a fault family at all; None: it can."""
        return None

    def fidelity(self) -> tuple[str, ...]:
        """What is not as its users would have it here."""
        return ()
