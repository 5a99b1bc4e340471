"""One process of a search: searches until its time is over, and reports its finds as lines
of JSON.
"""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.harness.fuzz.again import RealSearch
from trainchaos.harness.fuzz.damage import DamageSearch
from trainchaos.harness.fuzz.draw.draw import World
from trainchaos.harness.fuzz.draw.scale import for_real
from trainchaos.harness.fuzz.loader.loader import LoaderSearch
from trainchaos.harness.fuzz.loader.reading import ScenarioReader
from trainchaos.harness.fuzz.play.child import tied, undisturbed
from trainchaos.harness.fuzz.play.play import SimPlayer, kinds, strategies
from trainchaos.harness.fuzz.play.real import RealPlayer, launcher_of, playable
from trainchaos.harness.fuzz.search import DefectSearch, ReproducibleFind, Search

What = Literal["recovery", "loader", "judge"]
SIM = "sim"
REPORT_EVERY_S = 1.0
"""How often it reports its progress."""


class WorkerStopped(BaseException):
    """The parent process wants this process to end, or is gone. A BaseException, so that
    interrupted code does not catch it.
    """


def work(
    catalogue: Catalogue,
    *,
    strategy: str | None,
    seed: str,
    most_s: float,
    root: str,
    what: What = "recovery",
    launcher: str = SIM,
    most_runs: int | None = None,
) -> None:
    """Search until the time is over, ``most_runs`` were tried, or the parent process is gone; each
    line of standard output is a message. ``root``: for files; the parent removes it. A running job
    of ``launcher`` is ended, with all that it started, before this returns.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal: the parent ends this process
    until_s, parent = time.monotonic() + most_s, os.getppid()
    if launcher == SIM:
        found = _simulated(catalogue, strategy, seed, Path(root), what, until_s)
        _search(found, until_s, parent, most_runs)
        return
    search = RealSearch(
        world=world_of(launcher, strategy),
        player=RealPlayer(catalogue=catalogue, root=Path(root)),
        seed=seed,
        simulator=SimPlayer(catalogue=catalogue, root=Path(root)),
        tell=lambda found: _tell(found, steady=found.steady),
        until_s=until_s,
    )
    with suppress(WorkerStopped):
        signal.signal(signal.SIGTERM, _end)
        tied(parent)
        _search(search, until_s, parent, most_runs)


def _simulated(
    catalogue: Catalogue, strategy: str | None, seed: str, root: Path, what: What, until_s: float
) -> DefectSearch:
    """The searches that need no real processes."""
    world = World(kinds=kinds(), strategies=strategies(), strategy=strategy)
    if what == "loader":
        return LoaderSearch(
            world=world,
            reader=ScenarioReader(catalogue=catalogue, root=root),
            seed=seed,
            until_s=until_s,
        )
    player = SimPlayer(catalogue=catalogue, root=root)
    if what == "judge":
        return DamageSearch(world=world, player=player, seed=seed, until_s=until_s)
    return Search(world=world, player=player, seed=seed, until_s=until_s)


def world_of(launcher: str, strategy: str | None = None) -> World:
    """The options to draw from for a launcher of real processes on this machine."""
    scale = for_real(os.cpu_count() or 1, agents=launcher == "agents")
    possible = playable(kinds(), launcher_of(launcher))
    return World(
        kinds=possible, strategies=strategies(), strategy=strategy, launcher=launcher, scale=scale
    )


def _end(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise WorkerStopped


def _search(search: DefectSearch, until_s: float, parent: int, most_runs: int | None) -> None:
    reported: set[tuple[str, ...]] = set()
    next_s = 0.0
    most = math.inf if most_runs is None else most_runs
    while time.monotonic() < until_s and search.runs < most and os.getppid() == parent:
        found = search.step()
        if found is not None:
            _tell(found)
        if found is not None or time.monotonic() >= next_s:
            reported, next_s = _report(search, reported), time.monotonic() + REPORT_EVERY_S
    _report(search, reported)


def _tell(found: ReproducibleFind, *, steady: bool = True) -> None:
    files = {name: base64.b64encode(data).decode() for name, data in found.files().items()}
    _say({"find": found.find.key, "files": files, "steady": steady})


def _report(search: DefectSearch, reported: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    reached = set(search.coverage.times)
    new = [list(feature) for feature in sorted(reached - reported)]
    _say({"runs": search.runs, "refused": search.refused, "again": search.again, "reached": new})
    return reached


def _say(message: Mapping[str, Any]) -> None:
    with undisturbed():  # a partial line followed by another would not be a message
        print(json.dumps(message), flush=True)
