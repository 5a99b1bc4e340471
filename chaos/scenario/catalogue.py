"""Catalogue of everything a scenario may name.

Built by the command line, which may import everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from trainchaos.chaos.fault.base import Fault


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Name -> plugin model, whose fields are the YAML params.

    ``metrics``: name -> unit (s, ms, ratio, steps, samples, count, samples/s). ``per_arm``: metrics
    with one value per repeat, whatever the number of faults; the others have one per incident.
    """

    faults: Mapping[str, type[Fault]]
    strategies: Mapping[str, type[BaseModel]]
    launchers: Mapping[str, type[BaseModel]]
    workloads: Mapping[str, type[BaseModel]]
    metrics: Mapping[str, str]
    checkers: Collection[str]
    per_arm: Collection[str] = frozenset()
