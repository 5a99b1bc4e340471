"""Scenarios that showed a defect, as files for users to run or tests to replay."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from trainchaos.harness.fuzz.draw.text import as_yaml

MOST_TEXT = 300
"""Characters of the find's text."""


def as_file(tree: Mapping[str, Any], key: str, said: str) -> tuple[str, str]:
    """Name and text of a scenario's file, named after its launcher (unless it is the simulator),
    its strategy, its kinds of fault, and a short hash of the find; its description is the find.
    """
    kinds = "-".join(dict.fromkeys(fault["kind"] for fault in tree["faults"]))
    where = "" if tree["launcher"]["kind"] == "sim" else f"{tree['launcher']['kind']}-"
    name = re.sub(r"[^a-z0-9-]", "-", f"{where}{tree['recovery']['strategy']}-{kinds}"[:60])
    name = f"{name}-{short(key)}"
    about = {"version": tree["version"], "name": name, "description": f"Showed: {said[:MOST_TEXT]}"}
    return f"{name}.yaml", as_yaml({**about, **{k: v for k, v in tree.items() if k not in about}})


def short(key: str) -> str:
    """A short hash of a find."""
    return hashlib.blake2b(key.encode(), digest_size=3).hexdigest()
