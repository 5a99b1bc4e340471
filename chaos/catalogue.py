"""What may be named in a scenario. Built by the command line, which may import everything; passed in as an argument."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Name -> plugin model (its fields are the YAML params). ``metrics``: name -> unit (s, ms, ratio, steps, samples, count)."""

    faults: Mapping[str, type[BaseModel]]
    strategies: Mapping[str, type[BaseModel]]
    launchers: Mapping[str, type[BaseModel]]
    workloads: Mapping[str, type[BaseModel]]
    metrics: Mapping[str, str]
    checkers: Collection[str]
