"""Scenarios, examples and templates that come with this program, by name: ``builtin:NAME``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.home import HOME
from trainchaos.chaos.scenario.sla import nearest
from trainchaos.chaos.source.source import read_document

PREFIX = "builtin:"
NO_SCENARIOS = (".loader.yaml", ".damage.yaml")
"""Suffixes of other files that searches keep beside scenarios: invalid scenarios, and
changed logs.
"""
REGRESSIONS = "regressions"
"""Folder of scenarios that once showed a defect; nobody would choose one by its name."""
_COPIED = ("examples", "templates")


def scenarios() -> dict[str, Path]:
    """Name -> file of every scenario but regressions. A name is its path below ``scenarios``
    without the suffix: ``kill-one-rank``, ``process/term``.
    """
    root = HOME / "scenarios"
    return {
        str(path.relative_to(root).with_suffix("")): path
        for path in sorted(root.rglob("*.yaml"))
        if not path.name.endswith(NO_SCENARIOS) and REGRESSIONS not in path.parts
    }


def others() -> dict[str, Path]:
    """Name -> file or directory of examples and templates: ``examples/torchrun_ddp``."""
    return {
        f"{folder}/{path.name}": path
        for folder in _COPIED
        for path in sorted((HOME / folder).glob("[!._]*"))
    }


def find(name: str, *, among: dict[str, Path] | None = None) -> Path:
    """The scenario of a name, with or without ``builtin:``; its last part will do where only one
    ends so. ``among``: name -> path, instead of ``scenarios``. Raises ScenarioError that names the
    nearest.
    """
    wanted = name.removeprefix(PREFIX).removesuffix(".yaml")
    known = scenarios() if among is None else among
    if wanted in known:
        return known[wanted]
    ends = [path for one, path in known.items() if one.rpartition("/")[2] == wanted]
    if len(ends) == 1:
        return ends[0]
    near = nearest(wanted, list(known))
    more = [one for one in known if one.startswith(tuple(f"{folder}/" for folder in _COPIED))]
    hint = f"did you mean {PREFIX}{near}? " if near else ""
    hint += "chaos list scenarios shows all" + (" scenarios" if more else "")
    if more:
        hint += f"; there are also {', '.join(PREFIX + one for one in more)}"
    raise ScenarioError(f"nothing built in is called {wanted!r}", hint=hint)


def copy(name: str, directory: Path, *, force: bool = False) -> list[Path]:
    """Copy a scenario and what it extends, an example or a template into a directory, which is made
    if need be. Returns the new files. Nothing is written if one of them is there already, unless
    ``force``. Raises ScenarioError.
    """
    source = find(name, among={**scenarios(), **others()})
    files = dict(_files(source))
    targets = {directory / relative: path for relative, path in files.items()}
    taken = [str(target) for target in targets if target.exists() or target.is_symlink()]
    if taken and not force:
        raise ScenarioError(
            f"{', '.join(taken)}: there already", hint="--force replaces; or name another directory"
        )
    try:
        for target, path in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_symlink():
                target.unlink()
            shutil.copyfile(path, target)
    except OSError as error:
        raise ScenarioError(f"{error.filename}: cannot be written: {error.strerror}") from error
    return list(targets)


def _files(source: Path) -> Iterator[tuple[Path, Path]]:
    """Path below the target directory -> file. A scenario that extends one of a folder above keeps
    its own folder.
    """
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield Path(source.name) / path.relative_to(source), path
        return
    yield from chain_of(source) if source.suffix == ".yaml" else [(Path(source.name), source)]


def chain_of(scenario: Path) -> list[tuple[Path, Path]]:
    """A scenario that loads and those that it extends, itself first: path below a directory that
    holds all, such that each finds the next -> file. Raises ScenarioError.
    """
    chain = [scenario.resolve()]
    while base := read_document(chain[-1]).tree.get("extends"):
        chain.append((chain[-1].parent / str(base)).resolve())
    top = Path(os.path.commonpath([path.parent for path in chain]))
    return [(path.relative_to(top), path) for path in chain]
