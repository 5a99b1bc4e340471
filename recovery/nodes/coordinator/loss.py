"""Decides when a silent node is lost. Pure: the observations and their durations are arguments.

Silence proves nothing: the node's ranks train on as long as they reach their peers. Proof of a
node's end is that its agent's process ended (its connection is closed in order, which an agent that
only hangs up never does), or that it is gone and its ranks' peers report broken connections. An
agent killed with unread data leaves a reset, as one that hangs up does: that is no proof. Without
proof a node is given up only when the job cannot continue without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainchaos.recovery.nodes.link.beat_rate import LEAST_S, beat_s, ping_s

How = Literal["", "closed", "reset"]
Data = Literal["unknown", "lives", "failed"]
Verdict = tuple[Literal["wait", "dying", "lost"], str]
"""The verdict, and why a lost node is lost."""


class TakenAway(str):
    """Why a node is lost whose agent's process was seen to have ended, and not by an error of its
    own, as far as is known: what it was lost to lies outside the job.
    """


LEASE_GRACE_S = 10.0  # its agent may notice later than we do that the connection is dead
PROOF_S = 1.0  # between the end of a connection and the failure of others that it explains
# steps by which the other ranks must advance: one step may have been under way when a rank died
MOVED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class FleetLimits:
    """Seconds. ``hint_s``: after which a node whose peers failed is assumed dead; ``redial_s``:
    after which it, and any whose agent has ended, is lost; ``return_s``: the same, where nothing
    shows whether it lives; ``node_s``: for which the job waits for a silent node; ``silence_s``:
    after which the platform is asked; ``beat_s``: between two reports of an agent with changes;
    ``ping_s``: between two pings of a node (``recovery.nodes.link.beat_rate``);
    ``stale_s``: after which reports about its processes say nothing about now, with LEAST_S between
    two, otherwise as many times longer; ``pass_s``: for which a silent node is awaited before
    another one is asked to start a process; ``answer_s``: of silence of a node that was heard when
    it was asked, since a fork on a busy machine takes seconds; ``start_s``: for a process to be
    started; ``clear_s``: for all of a node's to be ended.
    """

    hint_s: float = 0.05
    redial_s: float = 0.25
    return_s: float = 5.0
    node_s: float = 15.0
    silence_s: float = 1.5
    beat_s: float = LEAST_S
    ping_s: float = 1.0
    stale_s: float = 0.25
    pass_s: float = 1.0
    answer_s: float = 5.0
    start_s: float = 30.0
    clear_s: float = 30.0

    @classmethod
    def of(cls, nodes: int, *, node_s: float) -> FleetLimits:
        """Those of a job on so many nodes. Where there are thousands, each is heard less often."""
        each_s = ping_s(nodes)
        silence_s = cls.silence_s * each_s
        return cls(node_s=node_s, beat_s=beat_s(nodes), ping_s=each_s, silence_s=silence_s)


@dataclass(frozen=True, kw_only=True)
class Absence:
    """One silent node. ``how`` its connection ended ("": it did not), and ``ended_s`` ago;
    ``silent_s``: since its last message; ``data``: what its ranks' peers on other nodes show about
    them since; ``trains``: it has ranks in the generation; ``wanted_s``: for how long the job has
    waited for it (0: it does not); ``ours``: the coordinator itself was away; ``alone``: it hears
    no node at all; ``lease_s``: after which its agent ends everything.
    """

    how: How
    ended_s: float
    silent_s: float
    data: Data
    trains: bool
    wanted_s: float
    ours: bool
    alone: bool
    lease_s: float


def judge(absence: Absence, limits: FleetLimits) -> Verdict:
    """Whether the node is lost by now."""
    if absence.how:
        verdict = _of_ended(absence, limits)
        if verdict[0] != "wait":
            return verdict
    # A coordinator that hears no node is cut off itself: giving all of them up would not help.
    if absence.wanted_s > limits.node_s and not absence.alone:
        return "lost", f"the job needs it, and it was not heard of for {limits.node_s:g} s"
    if absence.silent_s > absence.lease_s + LEASE_GRACE_S:
        return (
            "lost",
            f"it was silent for {absence.silent_s:.1f} s, longer than the lease of its agent",
        )
    return "wait", ""


def _of_ended(absence: Absence, limits: FleetLimits) -> Verdict:
    if absence.data == "failed":
        if absence.ended_s > limits.redial_s:
            return (
                "lost",
                (
                    "its ranks' peers failed, and its agent has not come back for"
                    f" {limits.redial_s:g} s"
                ),
            )
        return ("dying", "") if absence.ended_s > limits.hint_s else ("wait", "")
    proven = absence.how == "closed" and not absence.ours
    if proven and absence.data != "lives" and absence.ended_s > limits.redial_s:
        why = f"its agent ended, and has not come back for {limits.redial_s:g} s"
        return "lost", TakenAway(why)
    if not absence.trains and absence.ended_s > limits.return_s:
        return "lost", f"its agent has not come back for {limits.return_s:g} s"
    return "wait", ""
