"""Work on several processors: the parts of a projection, and the runs that are judged before."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import TypeVar

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.fuzz.play.child import tied

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def in_processes(
    items: Sequence[_Item],
    work: Callable[[_Item], _Made],
    each: Callable[[float], None],
    jobs: int,
) -> list[_Made]:
    """What ``work``, a function of a module, makes of each item, in their order; begun with the
    last, so that none of the largest is left alone at the end. ``each`` is told the share that is
    done.

    Processes are forked, as the locks of others have names, which whoever clears the machine's
    shared memory may remove; all are forked before ``each`` is told anything, so that a bar of
    progress has no thread yet. They end with this one, however it ends, and with the first that
    fails. Raises what ``work`` raises, and InfrastructureError where a process was killed.
    """
    if min(jobs, len(items)) <= 1:
        made: list[_Made] = []
        for item in reversed(items):
            made.insert(0, work(item))
            each(len(made) / len(items))
        return made
    others = active_children()
    pool = ProcessPoolExecutor(
        min(jobs, len(items)),
        mp_context=get_context("fork"),
        initializer=tied,
        initargs=(os.getpid(),),
    )
    try:
        futures = [pool.submit(work, item) for item in reversed(items)]
        for done, future in enumerate(as_completed(futures)):
            future.result()
            each((done + 1) / len(items))
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
    return [future.result() for future in reversed(futures)]
