"""Recognises the launcher of a command by its first words: how many ranks it starts, and whether it
starts them again by itself.

A new launcher is one entry of ``LAUNCHERS``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from trainchaos.chaos.scenario.frameworks import Framework
from trainchaos.harness.draft import arguments

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON = r"(?:.*/)?(?:python|pypy)[\d.]*"


@dataclass(frozen=True, kw_only=True)
class LauncherKind:
    """A launcher. ``start``: an expression for the first words, joined by blanks; ``ranks``,
    ``nodes``: options whose product is the number of ranks; ``one_each``: without them it starts
    one; ``restarts``: option for how often it starts its ranks again; ``env``: variables that its
    commands need under faults; ``note``: why, or what else to know.
    """

    name: str
    start: str
    ranks: str = ""
    nodes: str = ""
    one_each: bool = False
    restarts: str = ""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    note: str = ""


_STORE = MappingProxyType({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
_STORE_NOTE = "without it a job that torchrun restarts may read its predecessor's addresses"
_DAEMON = "its ranks are started by {}'s daemon, not below the command: they are not found"
LAUNCHERS = (
    LauncherKind(
        name="torchrun",
        start=rf"(?:.*/)?torchrun\b|{_PYTHON}(?: -\w)* -m torch\.distributed\.(?:run|launch)\b",
        ranks="nproc-per-node",
        nodes="nnodes",
        one_each=True,
        restarts="max-restarts",
        env=_STORE,
        note=_STORE_NOTE,
    ),
    LauncherKind(
        name="accelerate",
        start=rf"(?:.*/)?accelerate launch\b|{_PYTHON}(?: -\w)* -m accelerate\.commands\.launch\b",
        ranks="num-processes",
        restarts="max-restarts",
        env=_STORE,
        note=_STORE_NOTE,
    ),
    LauncherKind(
        name="deepspeed",
        start=rf"(?:.*/)?deepspeed\b|{_PYTHON}(?: -\w)* -m deepspeed\.launcher\.\w+\b",
        ranks="num-gpus",
        nodes="num-nodes",
        restarts="max-elastic-restarts",
    ),
    LauncherKind(
        name="srun",
        start=r"(?:.*/)?srun\b",
        ranks="n|ntasks",
        note=_DAEMON.format("Slurm"),
    ),
    LauncherKind(name="mpirun", start=r"(?:.*/)?(?:mpirun|mpiexec)\b", ranks="n|np"),
    LauncherKind(name="ray", start=r"(?:.*/)?ray job submit\b", note=_DAEMON.format("Ray")),
    LauncherKind(name="python", start=rf"{_PYTHON}\b"),
    LauncherKind(name="shell", start=r"(?:.*/)?(?:ba|da|z)?sh\b"),
)
"""In the order in which they are tried."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What the command line says. ``ranks``: None if it does not say; ``nodes`` that it waits for;
    ``restarts``: how often the launcher starts its ranks again; ``by``: what started it, if that is
    not the command itself.
    """

    kind: LauncherKind | None
    ranks: int | None = None
    nodes: int = 1
    restarts: int = 0
    by: str = ""

    @property
    def name(self) -> str:
        """Of the launcher, for people."""
        return self.kind.name if self.kind else "a program of its own"

    def env(self, frameworks: Iterable[Framework]) -> dict[str, str]:
        """Variables that it needs under faults, but those with which a framework does not start."""
        unset = {variable for one in frameworks for variable in one.unset}
        needed = self.kind.env if self.kind else {}
        return {variable: value for variable, value in needed.items() if variable not in unset}


def recognise(words: Sequence[str]) -> Launched:
    """The launcher of a command line, behind ``env`` and variables in front of it."""
    rest = _behind_shell(_behind_env(words))
    joined = " ".join(rest)
    kind = next((one for one in LAUNCHERS if re.match(one.start, joined)), None)
    if kind is None:
        return Launched(kind=None)
    nodes = arguments.number(rest, kind.nodes) or 1
    per_node = arguments.number(rest, kind.ranks)
    named = any(arguments.among(word.partition("=")[0], kind.ranks) for word in rest)
    if per_node is None and kind.one_each and not named:  # not --nproc-per-node gpu
        per_node = 1
    return Launched(
        kind=kind,
        ranks=None if per_node is None else per_node * nodes,
        nodes=nodes,
        restarts=arguments.number(rest, kind.restarts) or 0,
    )


def _behind_shell(words: list[str]) -> list[str]:
    """The words of ``bash -c "..."``, if it starts a launcher of ranks."""
    if len(words) < 3 or not re.fullmatch(r"-\w*c", words[1]):
        return words
    try:
        inner = shlex.split(words[2])
    except ValueError:  # not all that a shell reads is a list of words
        return words
    inner = _behind_env(inner[1:] if inner[:1] == ["exec"] else inner)
    starts = any(re.match(one.start, " ".join(inner)) for one in LAUNCHERS if one.ranks)
    return inner if starts else words


def _behind_env(words: Sequence[str]) -> list[str]:
    rest = list(words)
    if rest and rest[0].rpartition("/")[2] == "env":
        rest.pop(0)
    while rest and _ASSIGNMENT.fullmatch(rest[0]):
        rest.pop(0)
    return rest
