"""What can be said of containers that are nodes."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import BaseModel, Field, field_validator

RANK_MIB = 300
"""Memory of the smallest rank with its share of the agent's fork server."""


class Settings(BaseModel):
    """Parameters of launcher ``docker``, which describes them."""

    image: str = ""
    python: str = Field(default="python3", min_length=1)
    cpus: float | None = Field(default=None, ge=0.1)
    memory_mib: int | None = Field(default=None, ge=2 * RANK_MIB)
    shm_mib: int = Field(default=1024, ge=64)
    gpus: int | Literal["all"] = 0
    subnet: str = ""
    outside: bool = False
    mounts: tuple[str, ...] = ()

    @field_validator("subnet")
    @classmethod
    def _is_subnet(cls, text: str) -> str:
        if text and (net := ipaddress.IPv4Network(text)).prefixlen > 29:
            raise ValueError(f"{net} has no room for nodes: /29 or larger")
        return text

    @field_validator("gpus")
    @classmethod
    def _is_count(cls, gpus: int | str) -> int | str:
        if isinstance(gpus, int) and gpus < 0:
            raise ValueError("0 or more")
        return gpus

    @field_validator("mounts")
    @classmethod
    def _is_absolute(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for place in mounts:
            if not place.startswith("/") or place == "/":
                raise ValueError(f"{place!r} is no absolute path of a directory")
        return mounts
