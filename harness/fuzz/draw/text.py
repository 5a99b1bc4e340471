"""Scenario trees as YAML, as a person would write them: for users to run, or tests to replay."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

MOST_TEXT = 300
"""Characters of the find's text."""


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Block style at the top, and flow style, which is JSON, for each value and each fault; JSON is
    valid YAML 1.2.
    """
    lines = []
    for key, value in tree.items():
        if key == "faults" and value:
            lines.append("faults:")
            lines += [f"  - {flow(fault)}" for fault in value]
        else:
            lines.append(f"{key}: {flow(value)}")
    return "\n".join(lines) + "\n"


def flow(value: Any) -> str:
    """A value on one line: JSON, except for plain words."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(inner) for inner in value) + "]"
    if (
        isinstance(value, str)
        and value.replace("-", "").replace("_", "").isalnum()
        and not value[:1].isdigit()
    ):
        return value
    return json.dumps(value)


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
