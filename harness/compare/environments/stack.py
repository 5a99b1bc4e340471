"""Base class of a recovery stack in a comparison: pinned software, and a command that trains the
common job with it.

Every stack, ours included, runs as an external program (``workload: {command: ...}``), reports its
steps by ``chaos.beacon``, and gets its faults from the same injector, so that the same observers
measure all stacks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.home import import_root

Settings = Literal["default", "tuned"]
Value = int | float | str
"""Value of an option that a sweep may choose."""
Way = Literal["replica", "spare", "restart", "shrink", "none"]
"""How a stack continues after a failure, which decides what it is compared with. ``replica``:
survivors continue and the lost replica returns; ``spare``: a provisioned idle process replaces the
lost one; ``restart``: everything restarts from a checkpoint; ``shrink``: survivors continue and
nothing returns; ``none``: the job ends.
"""
CHECKPOINTS = "checkpoints"
"""Directory below ``$CHAOS_SCRATCH`` that every stack keeps its checkpoints in."""
FAMILIES = ("kill", "hang", "exception", "nan", "corrupt-checkpoint", "kill-while-saving")
"""Names of the fault families in ``scenarios/compare``, as passed to ``Stack.not_offered``."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Requirements of a separate environment. ``pins``: exact requirements for pip;
    ``without_dependencies``: pins to install with ``--no-deps``; ``python``: specifier of supported
    versions; ``probe``: a module whose import proves that it works; ``shared``: name of an
    environment shared by several stacks; by default it has the stack's name.
    """

    pins: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    python: str = ">=3.11"
    probe: str = ""
    shared: str = ""


@dataclass(frozen=True, kw_only=True)
class CommonJob:
    """The job that every stack trains: gpt of ``size`` on the corpus at ``data``, the same samples
    in each step for the same seed, AdamW with the built-in workload's settings, a checkpoint every
    ``every`` steps below ``$CHAOS_SCRATCH``.
    """

    size: str
    ranks: int
    steps: int
    global_batch: int
    every: int
    seed: int
    data: Path

    def environment(self) -> dict[str, str]:
        """Variables for ``from_environment``, and those with which ranks find these packages, use
        one thread each and communicate over the loopback interface. Part of every drive's ``env``.
        """
        variables = {f"JOB_{name.upper()}": str(value) for name, value in asdict(self).items()}
        return variables | {
            "PYTHONPATH": str(import_root()),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> CommonJob:
        """The job of this process; ``CHAOS_SEED``, the seed of the arm, takes precedence over
        ``JOB_SEED``. Raises ScenarioError that names missing or non-numeric values.
        """
        words = {field.name: env.get(f"JOB_{field.name.upper()}", "") for field in fields(cls)}
        words["seed"] = env.get("CHAOS_SEED") or words["seed"]
        known = {name: words[name] for name in ("ranks", "steps", "global_batch", "every", "seed")}
        numbers = {n: int(word) for n, word in known.items() if word.isascii() and word.isdigit()}
        wrong = [name for name in known if name not in numbers]
        wrong += [name for name in ("size", "data") if not words[name]]
        if wrong:
            raise ScenarioError(
                f"this script trains the job of a comparison, and its environment lacks "
                f"{', '.join(f'JOB_{name.upper()}' for name in wrong)}",
                hint="start it by chaos compare",
            )
        return cls(size=words["size"], data=Path(words["data"]), **numbers)


@dataclass(frozen=True, kw_only=True)
class Drive:
    """How to start a stack: ``argv`` (``$CHAOS_...`` is replaced), ``env``; ``restarts``: how often
    the harness may restart the command after an abnormal end, as a cluster does; ``checkpoints``:
    their directory.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    checkpoints: str = f"$CHAOS_SCRATCH/{CHECKPOINTS}"


def module(python: Path, name: str, *words: object, **options: object) -> tuple[str, ...]:
    """``python -m name --option value ... words``."""
    given = [
        word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)
    ]
    return (str(python), "-m", name, *map(str, (*given, *words)))


class Stack:
    """Base of a stack; one instance per setting."""

    title: ClassVar[str] = ""
    ours: ClassVar[bool] = False
    requirements: ClassVar[Requirements | None] = None
    """None: chaos's own environment."""
    tuned_because: ClassVar[str] = ""
    """Source of the ``tuned`` settings in the stack's documentation, with reasons."""
    way: ClassVar[Way] = "restart"
    grid: ClassVar[Mapping[str, tuple[Value, ...]]] = {}
    """Documented options -> values that a sweep tries, in all combinations; empty: nothing to
    sweep.
    """
    plain: ClassVar[Mapping[str, Value]] = {}
    """Values of the same options in the settings ``default``."""
    advised: ClassVar[Mapping[str, Value]] = {}
    """Values of the same options in the settings ``tuned`` if no sweep is recorded, as
    ``tuned_because`` explains.
    """

    def __init__(self, settings: Settings, *, values: Mapping[str, Value] | None = None) -> None:
        """``values``: from a sweep, replacing those of ``advised``; other options stay
        as advised.
        """
        self.settings = settings
        self.values: Mapping[str, Value] = (
            {**self.advised, **(values or {})} if settings == "tuned" else dict(self.plain)
        )

    @abstractmethod
    def chosen(self) -> Mapping[str, object]:
        """Options set by these settings, under the stack's own names; all others keep their
        defaults.
        """

    @abstractmethod
    def drive(self, job: CommonJob, python: Path) -> Drive:
        """The command. ``python``: interpreter of the stack's environment."""

    def provisioned(self, job: CommonJob) -> int:
        """Number of provisioned processes, spares included: what is paid for."""
        return job.ranks

    def not_offered(self, family: str) -> str | None:
        """Why this stack cannot take part in a fault family; None: it can."""
        return None

    def fidelity(self) -> tuple[str, ...]:
        """Differences between this setup and a typical deployment."""
        return ()
