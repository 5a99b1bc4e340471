"""Acts: what a fault does at once, to one target or many, is one incident.

A fault that kills four ranks is injected four times, once for each, and the job answers once.
Counted as four incidents it would have four values of every metric, three of which say little
(``lost steps [27, 0, 0, 0]``), and bounds would be as narrow as if the job had been tried four
times.

Hits belong together if the injector logged them as one act (``act`` in ``fault_injected``) and the
same generation met them. A target that was hit after the job had recovered from the other hits is a
separate incident. In logs without ``act``, each hit is.

The incident's costs are the act's, counted from its first hit:

- ``detection_time``, ``recovery_time``, ``outcome``: the worst of its targets (recovered, degraded,
  fail-stop, hang, sdc-escape, in this order). A target without a failure is not worse than the
  others once the job gave up over their failures: no process was left to detect it.
- ``phases``: of the target that took longest to recover; of several, the first one detected.
- ``steps_lost``: of each rollback that answered it, once.
- ``landed``, ``healed``: whether all hits were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainchaos.harness.judge.incident import Hit, Incident
from trainchaos.harness.judge.measure.incidents import incident_of
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import History

WORST = ("not-landed", "masked", "recovered", "degraded", "fail-stop", "hang", "sdc-escape")
"""Outcomes, the worst one last."""


def acts_of(history: History, episodes: Sequence[Episode]) -> list[tuple[Episode, ...]]:
    """Episodes by the act they belong to, acts in the order of their first hit."""
    acts: dict[object, list[Episode]] = {}
    for index, episode in enumerate(episodes):
        key: object = (index,)
        injected = episode.injected
        if injected is not None and (act := injected.data.get("act")) is not None:
            key = (episode.fault, injected.generation, act)
        acts.setdefault(key, []).append(episode)
    return [tuple(hits) for hits in acts.values()]


def incidents_of(
    history: History, acts: Sequence[Sequence[Episode]], control: History | None
) -> tuple[Incident, ...]:
    """The incident of each act. The steps of a rollback that answered several are counted for the
    first: the others have no lost steps and name the incident that they were answered with.

    Incidents that end with the same new step were answered together.
    """
    first: dict[int, str] = {}
    counted = []
    for hits in acts:
        incident = _together(hits, history, control)
        step = incident.first_new_step
        if step is not None and step in first:
            more = {"steps_lost": 0, "answered_with": first[step]}
            incident = incident.model_copy(update=more)
        elif step is not None:
            first[step] = incident.fault
        counted.append(incident)
    return tuple(counted)


def _together(hits: Sequence[Episode], history: History, control: History | None) -> Incident:
    if len(hits) == 1:
        return incident_of(hits[0], history, control)
    each = [incident_of(replace(hit, injected=hits[0].injected), history, control) for hit in hits]
    outcome = _outcome(each)
    # A target without a failure, in a job that ended over the others, has no times.
    timed = [
        one for one in each if one.outcome == outcome or one.detected_by or one.outcome != "hang"
    ]
    shown = max(timed, key=lambda one: (_length(one.recovery_time), -_length(one.detection_time)))
    rollbacks: dict[int | None, int] = {}
    for one in each:
        rollbacks[one.first_new_step] = max(rollbacks.get(one.first_new_step, 0), one.steps_lost)
    restored = [one.restored_step for one in each if one.restored_step is not None]
    detected = [one.detection_time for one in timed if one.detection_time is not None]
    return shown.model_copy(
        update={
            "occurrence": each[0].occurrence,
            "target": merged([hit.target for hit in hits]),
            "landed": all(one.landed for one in each),
            "healed": all(one.healed for one in each),
            "witness": ", ".join(dict.fromkeys(one.witness for one in each if one.witness)) or None,
            "evidence": merged([one.evidence for one in each]),
            "outcome": outcome,
            "detection_time": max(detected, default=None),
            "steps_lost": sum(rollbacks.values()),
            "restored_step": min(restored, default=None),
            "nodes": sorted({node for one in each for node in one.nodes}),
            "hits": [
                Hit(**{name: getattr(one, name) for name in Hit.model_fields}) for one in each
            ],
        }
    )


def _outcome(each: Sequence[Incident]) -> str:
    ended = any(one.outcome == "fail-stop" and one.detected_by for one in each)
    due = [
        one.outcome for one in each if not (ended and one.outcome == "hang" and not one.detected_by)
    ]
    return max(due, key=WORST.index)


def merged(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of several targets in one: a value that all share as it is, others as a list in the
    order of the hits.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in facts for name in one):
        values = [one[name] for one in facts if name in one]
        same = all(value == values[0] for value in values) and len(values) == len(facts)
        found[name] = values[0] if same else values
    return found


def _length(seconds: float | None) -> float:
    return -math.inf if seconds is None else seconds
