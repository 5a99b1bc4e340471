"""The parts of a projection on several processors, and whether there is memory for them: the
simulations, and the runs that are judged before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TypeVar

from trainchaos.chaos.errors import InfrastructureError, ScenarioError
from trainchaos.harness.fuzz.play.child import tied
from trainchaos.harness.projection.costs import RecoveryCost
from trainchaos.harness.projection.result import Projected, Setting

LOOK_S = 1.0
MEMORY = Path("/proc/meminfo")
SHARE = 0.8
"""Of the memory that is free; the rest is for what the estimate does not know."""
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")
Play = Callable[["Part", Callable[[float], None]], Projected]


@dataclass(frozen=True)
class Part:
    """One strategy at one size."""

    setting: Setting
    gpus: int
    cost: RecoveryCost


def play_all(
    parts: Sequence[Part], play: Play, each: Callable[[float], None], jobs: int
) -> list[Projected]:
    """Play all, in order of ``parts``. Each draws from its own seed, so that the figures are the
    same whatever ``jobs``. ``play``: a function of a module.

    Raises what ``play`` raises, and InfrastructureError where a process was killed.
    """
    # the largest first, so that none is left alone at the end
    return in_processes(parts, play, each, jobs, size=lambda part: part.gpus)


def in_processes(
    items: Sequence[_Item],
    work: Callable[[_Item, Callable[[float], None]], _Made],
    each: Callable[[float], None],
    jobs: int,
    size: Callable[[_Item], float] = lambda item: 0.0,
) -> list[_Made]:
    """What ``work``, a function of a module, makes of each item, in their order; begun in the order
    of their ``size``. ``each`` is told the share that is done.

    Processes are forked, as the locks of others have names, which whoever clears the machine's
    shared memory may remove; all are forked before ``each`` is told anything, so that a bar of
    progress has no thread yet. They end with this one, however it ends, and with the first that
    fails.

    Raises what ``work`` raises, and InfrastructureError where a process was killed.
    """
    if min(jobs, len(items)) <= 1:
        return [work(item, _inside(each, n, len(items))) for n, item in enumerate(items)]
    order = sorted(range(len(items)), key=lambda n: -size(items[n]))
    others = active_children()
    pool = ProcessPoolExecutor(
        min(jobs, len(items)),
        mp_context=get_context("fork"),
        initializer=tied,
        initargs=(os.getpid(),),
    )
    try:
        running: dict[Future[_Made], int] = {pool.submit(work, items[n], _silent): n for n in order}
        pending = set(running)
        while pending:
            done, pending = wait(pending, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            each(1.0 - len(pending) / len(items))
        found = {n: future.result() for future, n in running.items()}
    except BaseException as error:
        # what the others are at is of no use now, and may take hours
        for worker in set(active_children()).difference(others):
            worker.kill()
        if isinstance(error, BrokenProcessPool):
            raise InfrastructureError(
                "a process of the projection was killed", hint="fewer --trials or --jobs"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [found[n] for n in range(len(items))]


def _silent(share: float) -> None:
    """Progress within a part of another process is not told."""


def _inside(each: Callable[[float], None], done: int, count: int) -> Callable[[float], None]:
    return lambda share: each((done + share) / count)


def refuse_memory(need: float) -> None:
    """Raises ScenarioError where so many bytes are more than ``SHARE`` of what is available now,
    before anything is played. Where that is not known, nothing is refused.
    """
    free = available()
    if free is not None and need > SHARE * free:
        raise ScenarioError(
            f"the projection needs about {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are"
            " free",
            hint="fewer --trials, --gpus or --jobs, or a shorter --repair",
        )


def available() -> int | None:
    """Bytes of memory that can be had without swapping, by the kernel's MemAvailable; None where
    that is not known.
    """
    try:
        lines = MEMORY.read_text("ascii").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(found.split()[1]) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return None
