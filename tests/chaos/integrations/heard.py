"""What integrations say to a run: reports read back, and points answered without a harness."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainchaos import beacon
from trainchaos.harness.script.listen.progress import BeaconReader, GrowingFile, ProgressReport

REQUIRED = "frameworks" in os.environ.get("CHAOS_REQUIRE", "").split(",")
RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")


@dataclass(kw_only=True)
class Heard:
    """``points``: (name, step) of each call; ``orders``: what a call returns, or raises;
    ``confirmed``: calls of ``did``.
    """

    path: Path
    points: list[tuple[str, int]] = field(default_factory=list)
    orders: dict[tuple[str, int], str | Exception] = field(default_factory=dict)
    confirmed: list[tuple[str, int, float | None, float | None]] = field(default_factory=list)

    def reports(self) -> list[ProgressReport]:
        """All reports so far."""
        return BeaconReader(GrowingFile(self.path)).read()

    def steps(self) -> list[int]:
        """The steps that were reported."""
        return [one.step for one in self.reports() if one.busy_s is None]

    def losses(self) -> list[float | None]:
        """Their losses."""
        return [one.loss for one in self.reports() if one.busy_s is None]

    def order(self) -> list[str]:
        """All reports: steps by their number, other work by its name."""
        return [str(one.step) if one.busy_s is None else one.what for one in self.reports()]


@contextmanager
def listening(tmp_path: Path, *, points: bool = True) -> Iterator[Heard]:
    """A run that listens to this process."""
    heard = Heard(path=tmp_path / "beacon.txt")
    heard.path.touch()

    def point(name: str, step: int) -> str | None:
        heard.points.append((name, step))
        answer = heard.orders.get((name, step))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def did(
        what: str, step: int, *, before: float | None = None, after: float | None = None
    ) -> None:
        heard.confirmed.append((what, step, before, after))

    with pytest.MonkeyPatch.context() as patch:
        for name in RANK_NAMES:
            patch.delenv(name, raising=False)
        patch.setenv(beacon.VARIABLE, str(heard.path))
        if points:
            patch.setenv(beacon.POINTS, str(tmp_path / "points.txt"))
        else:
            patch.delenv(beacon.POINTS, raising=False)
        patch.setattr(beacon, "point", point)
        patch.setattr(beacon, "did", did)
        yield heard


def need(*frameworks: str) -> None:
    """Skip the module with a reason where a framework is absent; where CHAOS_REQUIRE names
    frameworks, fail.
    """
    absent = [name for name in frameworks if importlib.util.find_spec(name) is None]
    if absent and REQUIRED:
        pytest.fail(f"CHAOS_REQUIRE names frameworks: {', '.join(absent)} is not installed")
    if absent:
        pytest.skip(
            f"{', '.join(absent)} is not installed (make test-frameworks)", allow_module_level=True
        )
