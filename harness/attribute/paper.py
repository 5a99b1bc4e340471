"""An exam as files: the paper, which holds logs without answers, and its key, beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError, NewerVersion
from trainchaos.chaos.events.log import Log
from trainchaos.chaos.files import open_regular, write_whole
from trainchaos.harness.attribute.score import Keyed
from trainchaos.harness.explain.diagnosis import MOST_BYTES
from trainchaos.harness.explain.strip import write_stripped

VERSION = 1
MANIFEST = "manifest.json"


class PaperError(ChaosError):
    """A paper or key that cannot be written or read. Exit code 2."""

    exit_code = EXIT_USAGE


class Key(BaseModel):
    """The key to a paper: how it was made, and what really happened."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    launcher: str
    seed: int
    questions: list[Keyed]


def key_path(paper: Path) -> Path:
    """Where the key of a paper is: beside its directory, so that who gets the paper has it not."""
    return paper.with_name(f"{paper.name}.key.json")


def begin(paper: Path) -> None:
    """Make the directory of a paper. Raises PaperError if it is there already."""
    try:
        paper.mkdir(parents=True)
    except OSError as error:
        raise PaperError(
            f"{paper}: cannot be made: {error.strerror}", hint="name a directory that is not there"
        ) from error


def add(paper: Path, question: str, log: Log) -> None:
    """Write the stripped log of one question. Raises PaperError."""
    try:
        write_stripped(log, paper / question)
    except OSError as error:
        raise PaperError(f"{paper / question}: cannot be written: {error.strerror}") from error


def finish(paper: Path, key: Key, jobs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the manifest, which names no fault, and the key. ``jobs``: question -> its scenario."""
    rows = [
        {
            "id": one.id,
            "events": one.id,
            "strategy": one.strategy,
            "ranks": jobs[one.id]["workload"]["ranks"],
            "steps": jobs[one.id]["workload"]["steps"],
            "nodes": jobs[one.id]["launcher"].get("nodes", 1),
        }
        for one in key.questions
    ]
    manifest = {"version": VERSION, "simulated": key.launcher == "sim", "questions": rows}
    write_whole(paper / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    write_whole(key_path(paper), key.model_dump_json(indent=1) + "\n")


def read_key(paper: Path) -> Key:
    """The key of a paper. Raises PaperError and NewerVersion."""
    path = key_path(paper)
    try:
        with open_regular(path, follow=True) as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise PaperError(
            f"{path}: cannot be read: {error.strerror}",
            hint="chaos attribute --export DIR writes it beside DIR",
        ) from error
    if len(data) > MOST_BYTES:
        raise PaperError(f"{path}: more than {MOST_BYTES >> 20} MiB")
    try:
        tree = json.loads(data)
        version = tree.get("version") if isinstance(tree, dict) else None
        if type(version) is int and version > VERSION:
            raise NewerVersion(str(path), version, VERSION)
        return Key.model_validate(tree)
    except (ValueError, RecursionError) as error:
        said = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
        raise PaperError(f"{path}: is no key of an exam: {said[:200]}") from error


def ids(questions: Sequence[Keyed]) -> list[str]:
    """The questions' names."""
    return [one.id for one in questions]
