"""Reads a user's command, by its words, its scripts and what it was seen to start: which launcher
and which frameworks it uses, and what says how long it trains and where its checkpoints go.

A new launcher is one entry of ``LAUNCHERS``, a new framework one of ``chaos.scenario.frameworks``.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from trainchaos.chaos.scenario.frameworks import FRAMEWORKS, Framework

SCRATCH = "$CHAOS_SCRATCH"
GROUP = next(one.group for one in FRAMEWORKS if one.group)
"""Variable that names replica groups, also where the framework is not recognised."""
Ran = Mapping[tuple[str, ...], Path]
"""Words of processes -> the directory that each had, parents before their children."""

# ---- options

STEPS = (
    r"(?:(?:max-|num-|n-|total-|max-train-|num-train-|train-|training-)?steps"
    r"|(?:max-|num-|train-)?iters|(?:max-|num-)?iterations|(?:max|num)-updates)"
)
"""Options for the number of steps, with dashes in place of underscores. Dots lead:
``training.steps`` counts.
"""
EPOCHS = r"(?:max-|num-|n-|num-train-|total-)?epochs"
CHECKPOINTS = (
    r"(?:out(?:put)?-?dir|save(?:-dir|-path|-folder)?|ckpts?|ckpt-(?:dir|path)"
    r"|checkpoints?|checkpoint-(?:dir|path|folder)|checkpoint\.folder|default-root-dir"
    r"|dump-folder|run-dir|project-dir|storage-path|hydra\.run\.dir)"
)
RESUME = (
    r"(?:(?:auto-)?resume|resume-(?:training|from|from-checkpoint)|init-from|load(?:-checkpoint)?)"
)
_WORD = re.compile(r"(?:--?)?(?P<name>[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option with its value. ``head``: what stands before the value, with a blank at its end
    where that is a word of its own; ``index``: of the word with the value, None if only the script
    declares it.
    """

    head: str
    value: str
    index: int | None = None

    @property
    def name(self) -> str:
        """Without what stands between it and its value."""
        return self.head.rstrip("= ")

    def put(self, words: Sequence[str], value: str) -> list[str] | None:
        """The words with this value in place of its own, or else behind them; None if it cannot be
        put there.
        """
        text = value if self.head.endswith(" ") else self.head + value
        if self.index is not None:
            return [*words[: self.index], text, *words[self.index + 1 :]]
        if not any(word.endswith(".py") for word in words) or _is_line(words):
            return None
        return [*words, *([self.head.strip()] if self.head.endswith(" ") else []), text]

    def below_scratch(self) -> str:
        """A place in $CHAOS_SCRATCH, called as its own."""
        name = Path(self.value).name
        return f"{SCRATCH}/{name}" if name else SCRATCH


def among(name: str, names: str) -> bool:
    """Whether an option, as it is written in front of a value, is one of these (an expression)."""
    plain = name.strip("-= ").lower().replace("_", "-")
    return any(re.fullmatch(names, one) for one in (plain, plain.rpartition(".")[2]))


def find(words: Sequence[str], names: str, value: str = r".+") -> Option | None:
    """The last option of these names whose value matches: ``--max_steps 10``, ``--max-steps=10``,
    ``trainer.max_steps=10``. The last counts, as for argparse.
    """
    last = None
    for index, word in enumerate(words):
        match = _WORD.fullmatch(word)
        if match is None or not among(match["name"], names):
            continue
        if match["value"] is not None:
            head = word[: len(word) - len(match["value"])]
            option = Option(head=head, value=match["value"], index=index)
        elif word.startswith("-") and index + 1 < len(words):
            option = Option(head=f"{word} ", value=words[index + 1], index=index + 1)
        else:
            continue
        last = option if re.fullmatch(value, option.value) else last
    return last


def number(words: Sequence[str], names: str) -> int | None:
    """The whole number that an option gives."""
    option = find(words, names, r"\d{1,12}")
    return int(option.value) if option else None


def _is_line(words: Sequence[str]) -> bool:
    """Whether a shell reads the command: ``bash -c "..."``."""
    return any(re.fullmatch(r"-\w*c", word) for word in words[:2])


# ---- scripts

_MOST_TEXT = 1 << 20  # bytes read of a script
_MOST_SCRIPTS = 8
_PLACE = r"\w*(?:CKPT|CHECKPOINT|SAVE|OUTPUT|STORAGE)\w*"
_PLACE_READ = re.compile(
    rf"(?:environ(?:\.get\(|\[)|getenv\()\s*['\"](?P<python>{_PLACE})['\"]"
    rf"|\$\{{(?P<shell>{_PLACE}|(?:\w+_)?(?:OUT|RUN)(?:_?DIR)?):?[-=]"
)
"""A variable from which a script, or a script of a shell, reads where its checkpoints go."""
_NO_PLACE = re.compile(r"EVERY|INTERVAL|STEPS|FREQ|KEEP|LIMIT|LEVEL")
_READ = re.compile(
    r"(?:environ\.get|getenv)\(\s*['\"](\w+)['\"]\s*,\s*['\"]([^'\"\n]+)['\"]"
    r"|\$\{(\w+):?[-=]([^}\s]+)\}"
)
"""A variable with a default."""
_OPTION = re.compile(
    r"(?:add_argument|option)\(\s*(?:['\"]-\w['\"],\s*)?['\"](?P<name>--[\w.-]+)['\"]"
    r"(?P<rest>(?:[^()]|\([^()]*\))*)\)"
)
"""An option that a script declares to argparse or click."""
_DEFAULT = re.compile(r"\bdefault\s*=\s*(?:(?:\w+\.)?Path\()?(?:['\"]([^'\"]*)['\"]|(\d[\d_]*))")
_GLOBAL = re.compile(r"(?m)^([a-z]\w*)\s*=\s*(?:['\"]([^'\"\n]*)['\"]|(\d[\d_]*))\s*(?:#.*)?$")
"""A variable that nanoGPT's configurator.py makes an option."""
_NAMES = re.compile(r"[^\s'\"=;|&<>()]+\.(?:py|sh)(?![\w.])")


@dataclass(frozen=True, kw_only=True)
class ScriptText:
    """The scripts that a command names. ``name``: of the first; empty if there is none."""

    name: str = ""
    text: str = ""

    @property
    def place_variables(self) -> list[str]:
        """Variables from which they read where checkpoints go."""
        names = (one["python"] or one["shell"] for one in _PLACE_READ.finditer(self.text))
        return [name for name in dict.fromkeys(names) if not _NO_PLACE.search(name)]

    @property
    def defaults(self) -> dict[str, str]:
        """Variables that they read -> the default."""
        return {one[1] or one[3]: one[2] or one[4] for one in _READ.finditer(self.text)}

    @property
    def options(self) -> list[Option]:
        """Options that they declare, with their defaults."""
        heads = {}
        for one in _OPTION.finditer(self.text):
            if default := _DEFAULT.search(one["rest"]):
                heads[f"{one['name']} "] = default[1] or default[2] or ""
        if re.search(r"\bconfigurator\b", self.text):
            heads |= {f"--{one[1]}=": one[2] or one[3] or "" for one in _GLOBAL.finditer(self.text)}
        if re.search(r"(?m)^\s*(?:import|from)\s+hydra\b", self.text):
            heads["hydra.run.dir="] = "outputs"
        return [Option(head=head, value=value) for head, value in heads.items()]

    def declared(self, names: str) -> Option | None:
        """The first option of these names that they declare."""
        return next((one for one in self.options if among(one.head, names)), None)

    @property
    def resume(self) -> str:
        """The words that have it go on from a checkpoint; "" if it has no such option, or if
        nothing says with which value.
        """
        heads = [one.head for one in self.options if one.head.endswith("=")]
        for one in _OPTION.finditer(self.text):
            if among(one["name"], RESUME) and "store_true" in one["rest"]:
                return str(one["name"])
            heads.append(f"{one['name']} ")
        for head in heads:
            name = head.strip("-= ").replace("-", "_")
            latest = re.search(rf"\b{name}\s*==\s*['\"](resume|latest|last|auto)['\"]", self.text)
            if latest and among(head, RESUME):
                return head + latest[1]
        return ""


def read_scripts(words: Sequence[str], directory: Path) -> ScriptText:
    """The text of the scripts among a command's words, and of ``-m module`` below its directory."""
    paths = [directory / name for word in words for name in _script_names(word)]
    for flag, module in pairwise(words):
        if flag in ("-m", "--module") and re.fullmatch(r"[\w.]+", module):
            stem = directory / module.replace(".", "/")
            paths += [stem.with_suffix(".py"), stem / "__main__.py"]
    texts, name = list[str](), ""
    for path in dict.fromkeys(paths):
        try:
            if not path.is_file() or len(texts) == _MOST_SCRIPTS:
                continue
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
                texts.append(stream.read(_MOST_TEXT).decode(errors="replace"))
        except OSError:  # not readable, or too long for a name: a line for a shell
            continue
        name = name or (path.parent.name if path.name == "__main__.py" else path.stem)
    return ScriptText(name=name, text="\n".join(texts))


def _script_names(word: str) -> list[str]:
    """Names of scripts in a word: the word itself, what an option says, or words for a shell."""
    try:
        inner = shlex.split(word)
    except ValueError:  # not all words are a line for a shell
        inner = []
    whole = [one for one in (word, word.partition("=")[2], *inner) if one.endswith((".py", ".sh"))]
    return list(dict.fromkeys([*whole, *_NAMES.findall(word)]))


def frameworks_of(words: Sequence[str], script: ScriptText) -> list[Framework]:
    """All frameworks that the script or its command shows."""
    joined = " ".join(words)
    return [one for one in FRAMEWORKS if one.shown_by(script.text, joined)]


# ---- launchers

_PYTHON = r"(?:.*/)?(?:python|pypy)[\d.]*"
_MODULE = rf"{_PYTHON}(?: -\w)* -m"


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
        start=rf"(?:.*/)?torchrun\b|{_MODULE} torch\.distributed\.(?:run|launch)\b",
        ranks="nproc-per-node",
        nodes="nnodes",
        one_each=True,
        restarts="max-restarts",
        env=_STORE,
        note=_STORE_NOTE,
    ),
    LauncherKind(
        name="accelerate",
        start=rf"(?:.*/)?accelerate launch\b|{_MODULE} accelerate\.commands\.launch\b",
        ranks="num-processes",
        restarts="max-restarts",
        env=_STORE,
        note=_STORE_NOTE,
    ),
    LauncherKind(
        name="deepspeed",
        start=rf"(?:.*/)?deepspeed\b|{_MODULE} deepspeed\.launcher\.\w+\b",
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


def launched_by(words: Sequence[str]) -> Launched:
    """The launcher of a command line, behind ``env`` and variables in front of it."""
    rest = _behind_shell(_behind_env(words))
    kind = _kind_of(rest)
    if kind is None:
        return Launched(kind=None)
    nodes = number(rest, kind.nodes) or 1
    per_node = number(rest, kind.ranks)
    named = any(among(word.partition("=")[0], kind.ranks) for word in rest)
    if per_node is None and kind.one_each and not named:  # not --nproc-per-node gpu
        per_node = 1
    return Launched(
        kind=kind,
        ranks=None if per_node is None else per_node * nodes,
        nodes=nodes,
        restarts=number(rest, kind.restarts) or 0,
    )


def _kind_of(words: Sequence[str]) -> LauncherKind | None:
    joined = " ".join(words)
    return next((one for one in LAUNCHERS if re.match(one.start, joined)), None)


def _behind_shell(words: list[str]) -> list[str]:
    """The words of ``bash -c "..."``, if it starts a launcher of ranks."""
    if len(words) < 3 or not re.fullmatch(r"-\w*c", words[1]):
        return words
    try:
        inner = shlex.split(words[2])
    except ValueError:  # not all that a shell reads is a list of words
        return words
    inner = _behind_env(inner[1:] if inner[:1] == ["exec"] else inner)
    kind = _kind_of(inner)
    return inner if kind is not None and kind.ranks else words


def _behind_env(words: Sequence[str]) -> list[str]:
    rest = list(words)
    if rest and rest[0].rpartition("/")[2] == "env":
        rest.pop(0)
    while rest and re.match(r"[A-Za-z_]\w*=", rest[0]):
        rest.pop(0)
    return rest


# ---- the command


@dataclass(kw_only=True)
class Command:
    """The command as the scenario starts it. ``words``, ``env``: with checkpoints sent to
    $CHAOS_SCRATCH where that is possible; ``sent``: how they are sent there, for people; ``inner``:
    words of the scripts that it was seen to start.
    """

    words: list[str]
    env: dict[str, str]
    launched: Launched
    frameworks: list[Framework]
    script: ScriptText
    sent: str = ""
    inner: list[str] = field(default_factory=list)

    @property
    def group(self) -> str:
        """Variable that may name replica groups."""
        return next((one.group for one in self.frameworks if one.group), "")


def command_of(
    words: Sequence[str], env: Mapping[str, str], script: ScriptText, steps: int | None
) -> Command:
    """The command to start: ``steps`` in the argument that says them, checkpoints sent to
    $CHAOS_SCRATCH where an option or a variable of the script names their place.
    """
    launched, frameworks, new = launched_by(words), frameworks_of(words, script), list(words)
    needed, sent = launched.env(frameworks), ""
    for one in frameworks:
        needed |= one.env
    if steps is not None and (count := find(new, STEPS, r"\d+") or script.declared(STEPS)):
        new = count.put(new, str(steps)) or new
    place = find(new, CHECKPOINTS, r"(?!\d+$|true$|false$)[^-].*")
    if place is not None:
        sent = f"by {place.name}"
        if not place.value.startswith(SCRATCH):
            sent += f", which was {place.value}"
            new = place.put(new, place.below_scratch()) or new
    elif script.place_variables:
        for name in script.place_variables:
            needed.setdefault(name, SCRATCH)
            sent = f"by the variable {name}, which the script reads"
    elif (option := script.declared(CHECKPOINTS)) and (
        longer := option.put(new, option.below_scratch())
    ):
        new, sent = longer, f"by {option.name}, which the script declares"
    return Command(
        words=new,
        env=needed | dict(env),
        launched=launched,
        frameworks=frameworks,
        script=script,
        sent=sent,
    )


_INSTALLED = ("site-packages", "dist-packages", "lib/python")
"""In the paths of scripts that are no user's."""


def behind(command: Command, ran: Ran) -> Command:
    """The command, with the launcher, the frameworks and the arguments of what it started: they
    decide as much as if the user had typed them.
    """
    texts, inner, launched = [command.script.text], list[str](), command.launched
    for words, place in ran.items():
        plain = _without_interpreter(words)
        own = [word for word in words if not any(part in word for part in _INSTALLED)]
        script = read_scripts(own, place)
        if script.name and script.text not in texts:
            texts.append(script.text)
        inner += plain if script.name else ()
        if launched.kind is None or not (launched.kind.ranks or launched.kind.note):
            started = launched_by(plain)
            if started.kind is not None and started.kind.ranks:
                launched = replace(started, by=shlex.join(command.words[:2]))
    script = ScriptText(name=command.script.name, text="\n".join(texts))
    frameworks = frameworks_of([*command.words, *inner], script)
    return replace(
        command,
        launched=launched,
        frameworks=frameworks,
        script=script,
        inner=inner,
        env=launched.env(frameworks) | command.env,
    )


def _without_interpreter(words: tuple[str, ...]) -> list[str]:
    """``torchrun ...`` of ``python /bin/torchrun ...``, as the kernel says of a script."""
    program = Path(words[0]).name
    script = len(words) > 1 and not words[1].startswith("-") and Path(words[1]).suffix == ""
    return list(words[1:] if program.startswith(("python", "pypy")) and script else words)


def name_of(words: Sequence[str], script: ScriptText) -> str:
    """Name of the scenario: that of the script, or else of the program."""
    return plain_name(script.name or Path(words[0]).name)


def plain_name(stem: str) -> str:
    """The stem of a file as a scenario may be called."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")
    return plain[:60] or "job"
