"""What a recovery stack is to a comparison: pinned software, and a command line that trains the
common job under it.

Every stack, ours included, is started as a program from outside (``workload: {command: ...}``),
reports its steps by ``chaos.beacon``, and has its faults done to it by the same injector, so that
the same observers measure all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from chaos.errors import ScenarioError

Settings = Literal["default", "tuned"]
Value = int | float | str
"""Of an option that a sweep may choose."""
Way = Literal["replica", "spare", "restart", "shrink", "none"]
"""How a stack goes on, which decides what it is compared with: survivors go on and the lost replica
comes back; a process that is paid for all the time takes the lost one's place; everything starts
again from a checkpoint; survivors go on and nothing comes back; it does not.
"""
ROOT = Path(__file__).resolve().parents[3]
"""Where these packages lie; scripts in another environment find them by PYTHONPATH."""
CHECKPOINTS = "checkpoints"
"""Directory below ``$CHAOS_SCRATCH`` that every stack keeps its checkpoints in."""
FAMILIES = ("kill", "hang", "exception", "nan", "corrupt-checkpoint", "kill-while-saving")
"""Names of the fault families in ``scenarios/compare``, as ``Stack.not_offered`` is asked."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """An environment of its own. ``pins``: as pip takes them, exact; ``without_dependencies``: pins
    to install with ``--no-deps``; ``python``: versions it works with, as a specifier; ``probe``: a
    module whose import shows that it is ready; ``shared``: name of the environment where several
    stacks have one; else it has the stack's.
    """

    pins: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    python: str = ">=3.11"
    probe: str = ""
    shared: str = ""


@dataclass(frozen=True, kw_only=True)
class CommonJob:
    """What every stack trains: gpt of ``size`` on the corpus at ``data``, the same samples in each
    step for the same seed, AdamW with the built-in workload's settings, a checkpoint each ``every``
    steps below ``$CHAOS_SCRATCH``.
    """

    size: str
    ranks: int
    steps: int
    global_batch: int
    every: int
    seed: int
    data: Path

    def environment(self) -> dict[str, str]:
        """What ``from_environment`` reads, and what processes of a rank need to find these
        packages, to use one thread each and to talk over the loopback interface. Part of every
        drive's ``env``.
        """
        told = {f"JOB_{name.upper()}": str(value) for name, value in asdict(self).items()}
        return told | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> CommonJob:
        """The job of this process; ``CHAOS_SEED``, the seed of the arm, goes before ``JOB_SEED``.
        Raises ScenarioError that names what is missing or no number.
        """
        words = {field.name: env.get(f"JOB_{field.name.upper()}", "") for field in fields(cls)}
        words["seed"] = env.get("CHAOS_SEED") or words["seed"]
        numbers = {
            name: int(word) for name, word in words.items() if word.isascii() and word.isdigit()
        }
        wrong = [
            name
            for name in ("ranks", "steps", "global_batch", "every", "seed")
            if name not in numbers
        ]
        wrong += [name for name in ("size", "data") if not words[name]]
        if wrong:
            raise ScenarioError(
                f"this script trains the job of a comparison, and its environment lacks "
                f"{', '.join(f'JOB_{name.upper()}' for name in wrong)}",
                hint="start it by chaos compare",
            )
        return cls(
            size=words["size"],
            data=Path(words["data"]),
            ranks=numbers["ranks"],
            steps=numbers["steps"],
            global_batch=numbers["global_batch"],
            every=numbers["every"],
            seed=numbers["seed"],
        )


@dataclass(frozen=True, kw_only=True)
class Drive:
    """How to start it: ``argv`` (``$CHAOS_...`` is replaced), ``env``; ``restarts``: how often
    whoever runs it may start the command again when it ends abnormally, as a cluster does;
    ``checkpoints``: where it keeps them.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    checkpoints: str = f"$CHAOS_SCRATCH/{CHECKPOINTS}"


class Stack:
    """Base of a stack. One instance a setting."""

    title: ClassVar[str] = ""
    ours: ClassVar[bool] = False
    requirements: ClassVar[Requirements | None] = None
    """None: what chaos itself has."""
    tuned_because: ClassVar[str] = ""
    """Where its documentation recommends what ``tuned`` chooses, and why."""
    way: ClassVar[Way] = "restart"
    grid: ClassVar[Mapping[str, tuple[Value, ...]]] = {}
    """Documented options -> values that a sweep tries, in all combinations; empty: there is nothing
    to sweep.
    """
    plain: ClassVar[Mapping[str, Value]] = {}
    """The same options with settings ``default``."""
    advised: ClassVar[Mapping[str, Value]] = {}
    """The same options with settings ``tuned`` while no sweep is recorded: what ``tuned_because``
    says.
    """

    def __init__(self, settings: Settings, *, values: Mapping[str, Value] | None = None) -> None:
        """``values``: of a sweep, instead of ``advised``; options that are not in it stay as
        advised.
        """
        self.settings = settings
        self.values: Mapping[str, Value] = (
            {**self.advised, **(values or {})} if settings == "tuned" else dict(self.plain)
        )

    @abstractmethod
    def chosen(self) -> Mapping[str, object]:
        """The options of the stack that these settings set, by their own names; what is not here is
        its default.
        """

    @abstractmethod
    def drive(self, job: CommonJob, python: Path) -> Drive:
        """The command. ``python``: interpreter of the stack's environment."""

    def provisioned(self, job: CommonJob) -> int:
        """Processes that are held ready to train, spares included: what is paid for."""
        return job.ranks

    def not_offered(self, family: str) -> str | None:
        """Why this stack cannot be put under a fault family at all; None: it can."""
        return None

    def fidelity(self) -> tuple[str, ...]:
        """What is not as its users would have it here."""
        return ()
