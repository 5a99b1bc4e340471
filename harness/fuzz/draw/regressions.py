"""Scenarios that showed a defect, as files for users to run or tests to replay."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainchaos.chaos.files import replacing, write_whole
from trainchaos.harness.fuzz.draw.text import as_yaml

MOST_TEXT = 300
"""Characters of the find's text."""


def write(into: Path, tree: Mapping[str, Any], key: str, text: str) -> Path:
    """Write a scenario, named after its faults and its find; replaces a file of the same name.
    Raises OSError.
    """
    into.mkdir(parents=True, exist_ok=True)
    name, content = as_file(tree, key, text)
    write_whole(into / name, content)
    return into / name


def write_all(into: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files of a find; returns the first one's path. Raises OSError."""
    into.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with replacing(into / name) as stream:
            stream.write(content)
    return into / next(iter(files))


def as_file(tree: Mapping[str, Any], key: str, text: str) -> tuple[str, str]:
    """Name and content of a scenario's file, whose description is the find."""
    name = name_of(tree, key)
    lines = text.splitlines() or [key]
    said = lines[-1] if text.startswith("Traceback") else lines[0]
    about = {"version": tree["version"], "name": name, "description": f"Showed: {said[:MOST_TEXT]}"}
    return f"{name}.yaml", as_yaml({**about, **{k: v for k, v in tree.items() if k not in about}})


def name_of(tree: Mapping[str, Any], key: str) -> str:
    """Launcher (unless it is the simulator), strategy, kinds of fault, and a short hash of the
    find.
    """
    kinds = "-".join(dict.fromkeys(fault["kind"] for fault in tree["faults"]))
    where = "" if tree["launcher"]["kind"] == "sim" else f"{tree['launcher']['kind']}-"
    digits = hashlib.blake2b(key.encode(), digest_size=3).hexdigest()
    return (
        re.sub(r"[^a-z0-9-]", "-", f"{where}{tree['recovery']['strategy']}-{kinds}"[:60])
        + f"-{digits}"
    )
