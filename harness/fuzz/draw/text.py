"""Scenario trees as YAML, as a person would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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
