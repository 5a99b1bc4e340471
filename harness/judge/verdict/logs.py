"""The logs of a run while it is judged."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import Kind, Log, SenselessLog, read_log
from trainchaos.chaos.scenario.model import ResolvedRun
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.record.whole import broken
from trainchaos.harness.judge.verdict.arms import planned_arms


@contextmanager
def logs_of(
    run: RunDirectory, resolved: ResolvedRun
) -> Iterator[tuple[dict[str, Log], dict[str, str]]]:
    """(arm -> log, arm -> why its log was not read), for arms that at least started, all read at
    the expense of one budget, and let go at the end.

    Meanwhile nothing is looked for that refers to itself in a circle: each search looks at all
    events, and judging makes no such circle but of a log with what is derived from it, which is
    broken at the end.
    """
    searched = gc.isenabled()
    gc.disable()
    logs: dict[str, Log] = {}
    try:
        logs, unread = _read(run, resolved)
        yield logs, unread
    finally:
        for log in logs.values():
            log.forget()
        logs.clear()
        if searched:
            gc.enable()


def unplanned(run: RunDirectory, resolved: ResolvedRun) -> list[str]:
    """Arms that left events, and that the scenario does not plan."""
    planned = {name for cell in resolved.cells for name, _, _ in planned_arms(cell)}
    with suppress(OSError):
        return [name for name in run.arms() if name not in planned]
    return []


def _read(run: RunDirectory, resolved: ResolvedRun) -> tuple[dict[str, Log], dict[str, str]]:
    """(arm -> log, arm -> why its log was not read), for arms that at least started. All logs share
    one read budget.
    """
    budget = Budget()
    logs, unread = {}, {}
    for cell in resolved.cells:
        for name, _, _ in planned_arms(cell):
            try:
                log = read_log(run.events(name), budget)
            except SenselessLog as error:
                unread[name] = error.message
                continue
            except LogError:
                continue
            if log.unread:
                unread[name] = log.unread
            elif log.first(Kind.RUN_STARTED) is not None:
                logs[name] = log
            elif lost := broken(log):
                unread[name] = f"the record is not whole: {next(iter(lost.values()))}"
    return logs, unread
