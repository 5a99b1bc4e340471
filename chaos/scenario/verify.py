"""Conditions of a scenario on landed evidence: ``{measured_mbit_per_s: "< 30", signal:
SIGKILL}``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.scenario.sla import OPERATORS

_BOUND = re.compile(r"\s*(?P<op>[<>=!]+)\s*(?P<limit>.*?)\s*")
_COMPARE = frozenset({"<", "<=", ">", ">="})


def complaint(wanted: Any) -> str:
    """What is wrong with one condition, or ""."""
    if isinstance(wanted, bool | int | float):
        return ""
    if not isinstance(wanted, str):
        return "a condition is a value, or a comparison such as '< 30'"
    match = _BOUND.fullmatch(wanted)
    if match is None:
        return ""
    if match["op"] not in OPERATORS:
        return f"unknown comparison {match['op']!r}; use one of {', '.join(OPERATORS)}"
    if not match["limit"]:
        return f"nothing follows {match['op']!r}: write '{match['op']} 30'"
    if match["op"] in _COMPARE and _number(match["limit"]) is None:
        return f"{match['limit']!r} is not a number to compare with"
    return ""


def unmet(verify: Mapping[str, Any], evidence: Mapping[str, Any]) -> str | None:
    """Why the evidence does not meet the conditions; None: it does. Dots address nested mappings:
    ``exit.signal``.
    """
    for name, wanted in verify.items():
        found, seen = _reach(evidence, name)
        if not found:
            have = ", ".join(sorted(map(str, evidence))) or "nothing"
            return f"the evidence has no {name!r} (it has: {have})"
        if not _meets(seen, wanted):
            shown = repr(seen) if isinstance(seen, str) else str(seen)
            return f"{name} is {shown}, and must be {wanted}"
    return None


def _reach(evidence: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    if name in evidence:
        return True, evidence[name]
    head, _, rest = name.partition(".")
    inner = evidence.get(head)
    return _reach(inner, rest) if rest and isinstance(inner, Mapping) else (False, None)


def _meets(seen: Any, wanted: Any) -> bool:
    match = _BOUND.fullmatch(wanted) if isinstance(wanted, str) else None
    if match is None:
        return _same(seen, wanted)
    limit = _number(match["limit"])
    if match["op"] == "==" and limit is None:
        return _same(seen, match["limit"])
    number = _number(seen)
    if number is None or limit is None:
        return False
    return OPERATORS[match["op"]](number, limit)


def _same(seen: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(seen, bool):
        return str(seen).lower() == str(wanted).lower()
    number, limit = _number(seen), _number(wanted)
    return number == limit if number is not None and limit is not None else str(seen) == str(wanted)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
