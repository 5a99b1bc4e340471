"""Scenarios that showed a defect, as files that anybody can run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos.files import write_whole
from harness.fuzz.text import as_yaml

MOST_TEXT = 300
"""Characters of what it showed."""


def write(into: Path, tree: Mapping[str, Any], key: str, text: str) -> Path:
    """Write one, named after its faults and what it shows; one of the same name is replaced. Raises OSError."""
    into.mkdir(parents=True, exist_ok=True)
    name = name_of(tree, key)
    lines = text.splitlines() or [key]
    said = lines[-1] if text.startswith("Traceback") else lines[0]
    about = {"version": tree["version"], "name": name, "description": f"Showed: {said[:MOST_TEXT]}"}
    path = into / f"{name}.yaml"
    write_whole(path, as_yaml({**about, **{k: v for k, v in tree.items() if k not in about}}))
    return path


def name_of(tree: Mapping[str, Any], key: str) -> str:
    """Its strategy, its kinds of fault, and a few digits of what it shows."""
    kinds = "-".join(dict.fromkeys(fault["kind"] for fault in tree["faults"]))
    digits = hashlib.blake2b(key.encode(), digest_size=3).hexdigest()
    return re.sub(r"[^a-z0-9-]", "-", f"{tree['recovery']['strategy']}-{kinds}"[:60]) + f"-{digits}"
