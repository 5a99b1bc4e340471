"""Random scenarios for the simulator: any strategy, fault and point, faults during recovery
included.
"""

from __future__ import annotations

import random
from typing import Any

from tests.support.search.simulate import cell_of
from trainchaos.chaos.scenario.model import Cell

STEPS = 40
LAST_STEP = 27  # enough healthy steps must follow for the rate to be judged
RECOVERIES: tuple[dict[str, Any], ...] = (
    {"strategy": "checkpoint-restart"},
    {"strategy": "checkpoint-restart", "restart": "cold"},
    {"strategy": "drop-replica"},
    {"strategy": "drop-replica", "rejoin": False},
    {"strategy": "drop-replica", "batch": "shrink"},
    {"strategy": "hot-spare"},
    {"strategy": "hot-spare", "spares": 2},
    {"strategy": "hot-spare", "replenish": False},
)
KINDS = (
    "process-kill",
    "process-kill",
    "process-kill",
    "process-stop",
    "process-stop",
    "exception",
    "tensor-corrupt",
    "checkpoint-corrupt",
    "link-throttle",
    "straggler",
    "process-term",
    "process-term",
    "process-segv",
    "gil-deadlock",
    "gpu-hang",
    "collective-skip",
    "gpu-error",
    "gpu-lost",
)

FATAL = ("process-kill", "exception", "process-segv", "gpu-error", "gpu-lost")
SLOW_TO_SHOW = ("collective-skip", "gil-deadlock", "gpu-hang", "gpu-error", "process-term")


def random_cell(seed: int) -> Cell:
    """The scenario of a seed."""
    return _Dice(seed).cell()


class _Dice:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"random cell {seed}")
        self.recovery = self.rng.choice(RECOVERIES)
        self.spares = self.recovery["strategy"] == "hot-spare"
        self.shrinks = not self.recovery.get("rejoin", True)  # for good
        stays_small = self.shrinks or not self.recovery.get("replenish", True)
        self.ranks = self.rng.choice((4, 6) if stays_small else (2, 3, 4, 6))
        self.every = self.rng.choice((4, 8, 12))
        self.victim = self.rng.randrange(self.ranks)

    def cell(self) -> Cell:
        """One fault, or two."""
        first = self._first()
        second = self._second(first) if self.rng.random() < 0.6 else None
        faults = [fault for fault in (first, second) if fault is not None]
        keep = self.rng.choice((1, 2, 3))
        return cell_of(
            self.recovery, faults, ranks=self.ranks, steps=STEPS, every=self.every, keep=keep
        )

    def _first(self) -> dict[str, Any]:
        """At a step, a time or an event of a healthy job."""
        rng, kind = self.rng, self.rng.choice(KINDS)
        fault = {
            "id": "first",
            "kind": kind,
            "target": {"rank": self.victim},
            **_details(rng, kind),
        }
        at: dict[str, Any] = {"step": rng.randint(2, LAST_STEP), "phase": "any"}
        if kind == "checkpoint-corrupt":
            nth = rng.randint(2, LAST_STEP // self.every)
            return {
                **fault,
                "target": {"checkpoint": "latest"},
                "at": {"event": "checkpoint_committed", "nth": nth},
            }
        if kind in ("process-kill", "process-stop", "process-term", "gpu-lost"):
            time = {"time": round(rng.uniform(0.1, 1.0), 4)}
            saving = {"event": "checkpoint_saving", "nth": rng.randint(1, 2)}
            at = rng.choice((at, at, time, saving))
        if self.spares and kind == "process-kill" and rng.random() < 0.2:
            fault["target"] = {"role": "spare"}
        return {**fault, "at": at}

    def _second(self, first: dict[str, Any]) -> dict[str, Any] | None:
        """Another kill, in the middle of the recovery from the first or anywhere else."""
        rng, kind = self.rng, first["kind"]
        if kind in ("link-throttle", "straggler"):
            return None  # whoever is killed is not slow any more
        other = (self.victim + 1) % self.ranks
        fault: dict[str, Any] = {"id": "second", "kind": "process-kill", "target": {"rank": other}}
        if rng.random() < 0.3:
            fault["kind"] = rng.choice(("process-stop", "process-term"))
        fatal = kind in FATAL or (kind == "process-stop" and "duration" not in first)
        if fatal and "rank" in first["target"] and rng.random() < 0.7:
            if self.spares and rng.random() < 0.4:
                fault["target"] = {"role": "spare"}
            shrinks = self.recovery["strategy"] == "drop-replica"
            if shrinks and "rank" in fault["target"]:
                fault["target"] = {"rank": 0}
            events = (
                ("regroup",) if shrinks and self.victim == 0 else ("regroup", "recovery_started")
            )
            return {**fault, "at": {"event": rng.choice(events)}}
        if self.shrinks or "event" in first["at"] or first["target"] == {"role": "spare"}:
            return None  # what the first waits for may be gone by the time it comes
        if kind in SLOW_TO_SHOW:
            return None  # another death may come before anybody has seen the first fault's effect
        fault["target"] = {"rank": 0}  # there is always a rank 0
        return {**fault, "at": {"step": rng.randint(2, LAST_STEP), "phase": "any"}}


def _details(rng: random.Random, kind: str) -> dict[str, Any]:
    """Parameters, a duration where it lasts, the outcome where it is silent."""
    if kind == "process-stop" and rng.random() < 0.5:
        return {"duration": round(rng.uniform(0.05, 3.0), 3)}
    if kind == "process-term":
        return {"params": {"grace_s": rng.choice((0.01, 0.1, 1, 30))}}
    if kind in ("gil-deadlock", "gpu-hang"):
        return {"params": {"hold_s": rng.choice((0.2, 0.5, 5, 60))}}
    if kind == "tensor-corrupt":
        op = rng.choice(("nan", "inf", "nan", "bitflip"))
        surface = "gradient" if op == "bitflip" else rng.choice(("gradient", "parameter", "loss"))
        expect = {"expect": {"outcome": "sdc-escape"}} if op == "bitflip" else {}
        return {"params": {"surface": surface, "op": op}, **expect}
    if kind == "checkpoint-corrupt":
        return {"params": {"mode": rng.choice(("bitflip", "truncate", "missing", "stale"))}}
    if kind == "link-throttle":
        return {
            "params": {"mbit_per_s": rng.choice((20, 50))},
            "duration": {"steps": rng.randint(5, 7)},
        }
    if kind == "straggler":
        return {
            "params": {"factor": rng.choice((2.5, 4))},
            "duration": {"steps": rng.randint(5, 7)},
        }
    return {}
