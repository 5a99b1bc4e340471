"""What is right to say of each kind of fault: cause, layer, place and action. The one place.

Where several answers are right the truth is a set, the most exact answer first; ``why`` says what
an event log cannot tell apart, or why answers are equally right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError
from trainchaos.harness.explain.diagnosis import CauseClass as C
from trainchaos.harness.explain.diagnosis import Layer as L
from trainchaos.recovery.health.credible import failing
from trainchaos.recovery.playbook.entry import Action as A

Place = Literal["rank", "node", "member", "none", "any"]
"""``rank``: the rank hit; ``node``: a node hit; ``member``: any rank hit, or of a node hit;
``none``: nobody is named; ``any``: whoever is named, or nobody (a fault that acts on all).
"""
Trace = Literal["events", "values", "none"]
"""What is left of a fault in a log without fault events: ``events``: enough to tell; ``values``:
numbers that only an unfaulted run of the same seed shows to be wrong; ``none``: nothing.
"""


class NoTruth(ChaosError):
    """A kind of fault without a truth. Exit code 2."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What may be said of a fault; the first of each is the most exact."""

    causes: tuple[C, ...]
    layers: tuple[L, ...]
    places: tuple[Place, ...]
    actions: tuple[A, ...]
    trace: Trace = "events"
    why: str = ""


_ANYWHERE = (A.RESTART, A.RESTART_ELSEWHERE)
_HANG = (A.RESTART, A.RESTART_ELSEWHERE, A.FIX_CODE)
_LINK_DO = (A.CHECK_HARDWARE, A.WATCH, A.RESTART)
_GONE = (A.RESTART_ELSEWHERE, A.REBOOT_NODE, A.DRAIN_NODE)
_OFF = (A.RESET_DEVICE, A.REBOOT_NODE, A.DRAIN_NODE, A.REPLACE_HARDWARE, A.RESTART_ELSEWHERE)
_SIDES = "a collective stands still for all alike: which side is cut off leaves no event"
_KILLED = "a SIGKILL: who sent it is in no event of the job"

_CODE = Truth(
    causes=(C.CODE,), layers=(L.APPLICATION,), places=("rank",), actions=(A.FIX_CODE, A.RESTART)
)
_DEAD = Truth(
    causes=(C.PROCESS_DEATH,),
    layers=(L.SYSTEM, L.APPLICATION, L.HARDWARE),
    places=("rank",),
    actions=_ANYWHERE,
    why=_KILLED,
)
_STUCK = Truth(
    causes=(C.HANG,),
    layers=(L.APPLICATION, L.SYSTEM, L.HARDWARE),
    places=("rank",),
    actions=_HANG,
    why="that it stands still is seen from outside; why is not",
)
_LINK = Truth(
    causes=(C.LINK,), layers=(L.NETWORK,), places=("rank", "none"), actions=_LINK_DO, why=_SIDES
)
_NODE = Truth(causes=(C.NODE_LOSS,), layers=(L.HARDWARE, L.SYSTEM), places=("node",), actions=_GONE)
_DISK = Truth(
    causes=(C.STORAGE,),
    layers=(L.STORAGE,),
    places=("none", "rank"),
    actions=(A.FIX_CONFIGURATION, A.RESTART_ELSEWHERE, A.DRAIN_NODE, A.WATCH, A.CHECK_HARDWARE),
    why="the rank that saves reports what the disk does: naming it or nobody is right",
)
_SLOW_DISK = Truth(
    causes=(C.STORAGE, C.SLOWNESS),
    layers=(L.STORAGE,),
    places=("none", "rank"),
    actions=(A.WATCH, A.CHECK_HARDWARE, A.FIX_CONFIGURATION),
)
_CORRUPT = Truth(
    causes=(C.SILENT_CORRUPTION,),
    layers=(L.HARDWARE, L.APPLICATION),
    places=("rank",),
    actions=(A.CHECK_HARDWARE, A.OLDER_CHECKPOINT, A.RESTART_ELSEWHERE, A.DRAIN_NODE, A.WATCH),
    why="a flipped bit and a wrong kernel leave the same state",
)
_NAN = Truth(
    causes=(C.NONFINITE,),
    layers=(L.APPLICATION, L.HARDWARE),
    places=("rank",),
    actions=(A.OLDER_CHECKPOINT, A.WATCH, A.UNCLEAR, A.CHECK_HARDWARE),
    why="values that are not finite come from code, data and hardware alike",
)
_CONTROL = Truth(
    causes=(C.COORDINATOR,),
    layers=(L.SYSTEM,),
    places=("none",),
    actions=(A.WATCH, A.NONE, A.RESTART),
)

TRUTHS: Mapping[str, Truth] = MappingProxyType(
    {
        "checkpoint-corrupt": Truth(
            causes=(C.STORAGE,),
            layers=(L.STORAGE,),
            places=("none", "rank"),
            actions=(A.OLDER_CHECKPOINT,),
            why="who reads a damaged checkpoint is not who damaged it",
        ),
        "checkpoint-corrupt:killed": Truth(
            causes=(C.STORAGE, C.PROCESS_DEATH),
            layers=(L.STORAGE, L.SYSTEM),
            places=("rank",),
            actions=(A.OLDER_CHECKPOINT, *_ANYWHERE),
            why=f"the process that saves is killed in the save; {_KILLED}",
        ),
        "clock-skew": Truth(
            causes=(C.CLOCK,),
            layers=(L.SYSTEM,),
            places=("rank",),
            actions=(A.FIX_CONFIGURATION, A.WATCH),
            trace="none",
            why="times of events are monotonic: the wall clock is in none of them",
        ),
        "collective-skip": Truth(
            causes=(C.HANG,),
            layers=(L.APPLICATION,),
            places=("rank",),
            actions=(A.FIX_CODE, *_ANYWHERE),
        ),
        "coordinator-kill": _CONTROL,
        "crash-loop": _CODE,
        "data-corrupt": Truth(
            causes=(C.SILENT_CORRUPTION, C.DATA),
            layers=(L.APPLICATION, L.STORAGE),
            places=("rank",),
            actions=(A.FIX_CODE, A.OLDER_CHECKPOINT),
            trace="values",
            why="sample ids stay right and the loss plausible",
        ),
        "data-stall": Truth(
            causes=(C.DATA,),
            layers=(L.STORAGE, L.APPLICATION, L.SYSTEM),
            places=("rank",),
            actions=(A.WATCH, A.FIX_CONFIGURATION, *_ANYWHERE),
            why="a slow file server and slow preparation wait alike",
        ),
        "disk-full": _DISK,
        "exception": _CODE,
        "gil-deadlock": _STUCK,
        "gpu-error": Truth(
            causes=(C.DEVICE,),
            layers=(L.HARDWARE, L.APPLICATION),
            places=("rank",),
            actions=(A.RESTART, *_OFF),
            why="an illegal access of the program and a faulty device leave the same sticky error",
        ),
        "gpu-hang": _STUCK,
        "gpu-lost": Truth(causes=(C.DEVICE,), layers=(L.HARDWARE,), places=("rank",), actions=_OFF),
        "gpu-oom": Truth(
            causes=(C.MEMORY,),
            layers=(L.APPLICATION,),
            places=("rank",),
            actions=(A.FIX_CONFIGURATION, A.RESTART),
        ),
        "health-event": Truth(
            causes=(C.DEVICE,),
            layers=(L.HARDWARE,),
            places=("rank", "node"),
            actions=(*_OFF, A.CHECK_HARDWARE),
        ),
        "health-event:warning": Truth(
            causes=(C.DEVICE,),
            layers=(L.HARDWARE,),
            places=("rank", "node"),
            actions=(A.WATCH, A.RESTART, A.CHECK_HARDWARE, A.NONE),
            why="contained, or no failure yet: nothing has to leave the device",
        ),
        "heartbeat-drop": Truth(
            causes=(C.FALSE_ALARM,),
            layers=(L.SYSTEM,),
            places=("rank",),
            actions=(A.WATCH, A.NONE, A.RESTART, A.FIX_CONFIGURATION),
        ),
        "io-error": _DISK,
        "io-slow": _SLOW_DISK,
        "link-delay": _LINK,
        "link-flap": _LINK,
        "link-loss": _LINK,
        "link-throttle": _LINK,
        "node-isolate": Truth(
            causes=(C.LINK,),
            layers=(L.NETWORK,),
            places=("node", "member", "none"),
            actions=_LINK_DO,
            why=_SIDES,
        ),
        "node-kill": _NODE,
        "node-slow": Truth(
            causes=(C.SLOWNESS,),
            layers=(L.SYSTEM, L.HARDWARE),
            places=("node",),
            actions=(A.WATCH, A.CHECK_HARDWARE, A.DRAIN_NODE, A.FIX_CONFIGURATION),
        ),
        "node-stop": Truth(
            causes=(C.NODE_LOSS, C.HANG),
            layers=(L.HARDWARE, L.SYSTEM),
            places=("node",),
            actions=_GONE,
            why="a frozen node and a lost one are both silent as a whole",
        ),
        "oom-kill": Truth(
            causes=(C.MEMORY, C.PROCESS_DEATH),
            layers=(L.SYSTEM, L.APPLICATION),
            places=("rank",),
            actions=(A.FIX_CONFIGURATION, *_ANYWHERE),
            why=f"{_KILLED}; the kernel's count of kills is a witness of the harness",
        ),
        "partition": _LINK,
        "poison-sample": Truth(
            causes=(C.DATA, C.NONFINITE),
            layers=(L.APPLICATION,),
            places=("any",),
            actions=(A.FIX_CODE, A.WATCH, A.NONE, A.FIX_CONFIGURATION),
            why="it acts in every rank; whoever leaves the share out never finds the sample",
        ),
        "process-kill": _DEAD,
        "process-segv": Truth(
            causes=(C.CODE,),
            layers=(L.APPLICATION,),
            places=("rank",),
            actions=(A.RESTART, A.FIX_CODE),
        ),
        "process-stop": _STUCK,
        "process-term": Truth(
            causes=(C.PREEMPTION,),
            layers=(L.SYSTEM,),
            places=("rank",),
            actions=(A.RESTART_ELSEWHERE, A.RESTART, A.NONE),
        ),
        "rack-kill": _NODE,
        "rank-hang": _STUCK,
        "read-only": _DISK,
        "replica-desync": _CORRUPT,
        "spare-kill": Truth(
            causes=(C.PROCESS_DEATH,),
            layers=_DEAD.layers,
            places=("none",),
            actions=_ANYWHERE,
            why=_KILLED,
        ),
        "store-kill": _CONTROL,
        "store-kill:unused": Truth(
            causes=_CONTROL.causes,
            layers=_CONTROL.layers,
            places=_CONTROL.places,
            actions=_CONTROL.actions,
            trace="none",
            why="training does not use the store",
        ),
        "store-latency": _CONTROL,
        "straggler": Truth(
            causes=(C.SLOWNESS,),
            layers=(L.HARDWARE, L.SYSTEM),
            places=("rank",),
            actions=(A.WATCH, A.CHECK_HARDWARE, A.DRAIN_NODE, A.RESTART_ELSEWHERE),
        ),
        "tensor-corrupt": _CORRUPT,
        "tensor-corrupt:nonfinite": _NAN,
        "tensor-corrupt:averaged": Truth(
            causes=_CORRUPT.causes,
            layers=_CORRUPT.layers,
            places=_CORRUPT.places,
            actions=_CORRUPT.actions,
            trace="values",
            why="a finite gradient is averaged over all replicas, which then agree",
        ),
    }
)
"""By kind, and ``kind:case`` where parameters decide."""
_RESTARTS_ALL = ("checkpoint-restart",)
_UNSEEN = Truth(
    causes=(C.NODE_LOSS, C.HANG),
    layers=(L.HARDWARE, L.SYSTEM, L.APPLICATION),
    places=("node", "member"),
    actions=(*_GONE, A.RESTART),
    why="the strategy ends all processes as the first is found to hang, and the others of the node "
    "before anybody has seen that they are frozen",
)
_HANGS = ("gil-deadlock", "gpu-hang", "process-stop", "rank-hang")
_STATE = ("parameter", "optimizer_state")


def truth_of(
    kind: str, params: Mapping[str, Any], at: Mapping[str, Any], strategy: str = ""
) -> Truth:
    """The truth of a fault with its parameters and trigger, as in a scenario, in a job with that
    recovery strategy. Raises NoTruth.
    """
    found = TRUTHS.get(f"{kind}:{_case(kind, params, at)}") or TRUTHS.get(kind)
    if found is None:
        raise NoTruth(
            f"the fault kind {kind!r} has no truth", hint="add it to harness/attribute/truth.py"
        )
    if kind in _HANGS and at.get("phase") == "data":
        return _in_data(found)
    if kind == "node-stop" and strategy in _RESTARTS_ALL:
        return _UNSEEN
    return found


def _in_data(truth: Truth) -> Truth:
    """A hang where samples are fetched looks like samples that do not come."""
    return Truth(
        causes=(*truth.causes, C.DATA),
        layers=(*truth.layers, L.STORAGE),
        places=truth.places,
        actions=(*truth.actions, A.WATCH, A.FIX_CONFIGURATION),
        why="it stands still where it fetches its samples: waiting and hanging look alike there",
    )


def _case(kind: str, params: Mapping[str, Any], at: Mapping[str, Any]) -> str:
    """Which of a kind's truths its parameters ask for; "": the kind's own."""
    match kind:
        case "checkpoint-corrupt":
            return "killed" if params.get("mode") in ("torn", "lose-unsynced") else ""
        case "health-event":
            what, code = str(params.get("what", "xid")), int(params.get("code", 94))
            return "" if failing(what, code) else "warning"
        case "store-kill":
            return "" if at.get("event") == "regroup" else "unused"
        case "tensor-corrupt":
            if params.get("op", "nan") in ("nan", "inf"):
                return "nonfinite"
            return "" if params.get("surface", "gradient") in _STATE else "averaged"
    return ""
