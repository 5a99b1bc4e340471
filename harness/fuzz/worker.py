"""One process of a search: searches until its time is over, and reports its finds as lines
of JSON.
"""

from __future__ import annotations

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
from trainchaos.harness.fuzz.damage import Damages
from trainchaos.harness.fuzz.draw.draw import World
from trainchaos.harness.fuzz.draw.scale import for_real
from trainchaos.harness.fuzz.play.child import tied, undisturbed
from trainchaos.harness.fuzz.play.play import SimPlayer, kinds, strategies
from trainchaos.harness.fuzz.play.real import RealPlayer, launcher_of, playable
from trainchaos.harness.fuzz.schedules import REAL_NEEDED, REAL_PLAYS, REAL_SMALLER, Schedules
from trainchaos.harness.fuzz.search import Search, ShrunkFind

What = Literal["recovery", "judge"]
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
    until_s, parent, files = time.monotonic() + most_s, os.getppid(), Path(root)
    world, simulator = world_of(launcher, strategy), SimPlayer(catalogue=catalogue, root=files)
    search: Search[Any]
    if what == "judge":
        search = Search(Damages(world, simulator, seed), until_s=until_s, tell=_tell)
    elif launcher == SIM:
        search = Search(Schedules(world, simulator, seed), until_s=until_s, tell=_tell)
    else:
        player = RealPlayer(catalogue=catalogue, root=files)
        search = Search(
            Schedules(world, player, seed, simulator=simulator),
            until_s=until_s,
            tell=_tell,
            plays=REAL_PLAYS,
            needed=REAL_NEEDED,
            most_smaller=REAL_SMALLER,
        )
    with suppress(WorkerStopped):
        if launcher != SIM:
            signal.signal(signal.SIGTERM, _end)
            tied(parent)
        _search(search, parent, math.inf if most_runs is None else most_runs)


def world_of(launcher: str, strategy: str | None = None) -> World:
    """The options to draw from for a launcher: those that it can play on this machine."""
    if launcher == SIM:
        return World(kinds=kinds(), strategies=strategies(), strategy=strategy)
    scale = for_real(os.cpu_count() or 1, agents=launcher == "agents")
    possible = playable(kinds(), launcher_of(launcher))
    return World(
        kinds=possible, strategies=strategies(), strategy=strategy, launcher=launcher, scale=scale
    )


def _end(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise WorkerStopped


def _search(search: Search[Any], parent: int, most: float) -> None:
    reported: set[tuple[str, ...]] = set()
    next_s = 0.0
    while time.monotonic() < search.until_s and search.runs < most and os.getppid() == parent:
        found = search.step()
        if found is not None:
            _tell(found)
        if found is not None or time.monotonic() >= next_s:
            reported, next_s = _report(search, reported), time.monotonic() + REPORT_EVERY_S
    _report(search, reported)


def _tell(found: ShrunkFind[Any]) -> None:
    file = {"name": found.name, "text": found.text, "steady": found.steady}
    _say({"find": found.find.key, **file})


def _report(search: Search[Any], reported: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    reached = set(search.coverage.times)
    new = [list(feature) for feature in sorted(reached - reported)]
    _say({"runs": search.runs, "refused": search.refused, "reached": new})
    return reached


def _say(message: Mapping[str, Any]) -> None:
    with undisturbed():  # a partial line followed by another would not be a message
        print(json.dumps(message), flush=True)
