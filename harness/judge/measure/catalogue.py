"""All metrics: unit, direction, number of values per arm, and the definition of one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Per = Literal["incident", "arm", "checkpoint"]


@dataclass(frozen=True, kw_only=True)
class MetricDef:
    """``better``: which direction; ``doc``: definition of one value; ``per``: what gives one value;
    ``clocks``: how many readings of ranks' clocks are in it (minus the coordinator's, or another
    rank's); for a share of the wall time, how many per generation.
    """

    unit: str
    better: Literal["lower", "higher", "neither"]
    per: Per
    doc: str
    clocks: int = 0


def _lower(unit: str, per: Per, doc: str) -> MetricDef:
    return MetricDef(unit=unit, better="lower", per=per, doc=doc)


def _seconds(per: Per, doc: str, clocks: int = 0) -> MetricDef:
    return MetricDef(unit="s", better="lower", per=per, doc=doc, clocks=clocks)


def _higher(unit: str, doc: str, clocks: int = 0) -> MetricDef:
    return MetricDef(unit=unit, better="higher", per="arm", doc=doc, clocks=clocks)


METRICS: Mapping[str, MetricDef] = MappingProxyType(
    {
        "detection_time": _seconds(
            "incident", "fault injected to failure detected; infinite if it harmed undetected"
        ),
        "recovery_time": _seconds(
            "incident",
            "fault injected to the job's first new commit after the failure, even if a later"
            " rollback discards it; infinite if the job never recovered; no value if the fault was"
            " masked or no step was left to commit",
            clocks=1,
        ),
        "time_to_full_rate": _seconds(
            "incident",
            "fault injected to the first of 5 steps whose median rate is at least 90 % of the"
            " control's",
            clocks=1,
        ),
        "time_to_redundancy": _seconds(
            "incident",
            "fault injected to all ranks and all spares there again; infinite if that never came",
            clocks=1,
        ),
        "failure_cost": _lower(
            "rank-hours",
            "incident",
            "provisioned ranks x recovery time; infinite if the job never recovered",
        ),
        "steps_lost": _lower(
            "steps",
            "incident",
            "committed steps that were redone, one value for each rollback; infinite if the job"
            " never recovered",
        ),
        "samples_lost": _lower(
            "samples", "arm", "samples of the reference order that the lineage lacks"
        ),
        "samples_duplicated": _lower(
            "samples", "arm", "samples the lineage holds more often than the order does"
        ),
        "checkpoint_stall": _seconds(
            "checkpoint",
            "pause of training after a checkpointed step beyond the usual one and an evaluation",
        ),
        "samples_skipped": _lower(
            "samples",
            "arm",
            "samples of the order that the job skipped by decision, as they could not be computed",
        ),
        "replicas_diverged": _lower(
            "replicas",
            "arm",
            "ranks found to hold another state than most; without a majority, 1 for all of them",
        ),
        "saves_failed": _lower(
            "saves", "arm", "checkpoints that could not be saved; the next interval tries again"
        ),
        "alarms_unexplained": _lower(
            "alarms",
            "arm",
            "alarms of health detectors, of a place that no fault had hit before, or before any"
            " fault",
        ),
        "step_time": _seconds(
            "arm",
            "median duration of the surviving steps, without checkpoint stalls and evaluations",
            clocks=2,
        ),
        "steady_overhead": _lower(
            "ratio", "arm", "fault-free step time over the bare loop's; only benchmarks have it"
        ),
        "goodput": _higher(
            "ratio",
            "useful samples x ideal time per sample, at most the time they took, / (wall time x"
            " provisioned ranks); 0 if the job did not finish",
            clocks=2,
        ),
        "ettr": _higher(
            "ratio",
            "effective training time ratio: time in surviving steps, checkpoint stalls left out,"
            " / wall time",
            clocks=2,
        ),
        "mfu": _higher(
            "ratio",
            "model FLOPs utilisation: operations that the samples of a median step need / what the"
            " devices can do",
            clocks=2,
        ),
        "throughput": _higher("samples/s", "samples of the lineage per second of wall time"),
        "abort_time": _seconds(
            "incident", "failure detected to all survivors parked, or to the decision"
        ),
        "regroup_time": _seconds(
            "incident", "abort to the last group formed, process starts included", clocks=1
        ),
        "restore_time": _seconds(
            "incident", "group formed to the last member holding its state", clocks=2
        ),
        "redo_time": _seconds(
            "incident", "state held to the old highest step committed again", clocks=2
        ),
    }
)
