"""Predicts a job's next group for each member that may be lost: what its strategy would answer.

A pure function, as strategies are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainchaos.recovery.policy.strategy import (
    Cause,
    ClusterView,
    Failure,
    Form,
    Health,
    StateFrom,
    Strategy,
)

MOST_RANKS = 8
"""In a larger job nothing is predicted: each process would hold about as many groups as the job has
ranks, and as many connections as that squared.
"""

Members = tuple[str, ...]


def likely_groups(strategy: Strategy, view: ClusterView) -> Mapping[int, Members]:
    """Rank that may be lost -> members of the generation that follows, by rank, for each that needs
    no new process and no checkpoint. Where several losses lead to the same group, the first has it.
    """
    if not strategy.keeps_survivors or not 1 < len(view.members) <= MOST_RANKS:
        return {}
    found: dict[int, Members] = {}
    for rank, name in enumerate(view.members):
        members = _after(strategy, view, name, rank)
        if len(members) > 1 and members not in found.values():
            found[rank] = members
    return found


def _after(strategy: Strategy, view: ClusterView, lost: str, rank: int) -> Members:
    """Members of the next generation, if only that one is killed now; () if they are not known."""
    step = view.process(lost).step
    failure = Failure(
        process=lost,
        rank=rank,
        cause=Cause.EXIT,
        step=step,
        time_s=view.now_s,
        generation=view.generation,
    )
    processes = tuple(
        one._replace(
            health=Health.DEAD if one.name == lost else Health.PARKED,
            valid=one.name != lost,
            step=step,
        )
        if one.name in view.members
        else one
        for one in view.processes
    )
    supposed = replace(view, processes=processes, failures=(failure,), tried=())
    try:
        decision = strategy.on_failure(supposed)
    except Exception:  # of a plugin, to a loss that has not happened: no reason to end the job
        return ()
    for action in decision.actions:
        if isinstance(action, Form) and action.state is StateFrom.PEER and not action.refill:
            known = all(name != lost and not name.startswith("new-") for name in action.members)
            return action.members if known else ()
    return ()
