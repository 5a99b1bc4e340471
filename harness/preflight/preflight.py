"""A preflight: every place is asked what the checks measure, in a time that is bounded."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.preflight import baseline as baselines
from trainchaos.harness.preflight import compare
from trainchaos.harness.preflight.check import HOST, Asking, Finding, Findings, Rate
from trainchaos.harness.preflight.places import CHECKS, Places

QUICK = ("memory", "product")
"""Of a suspect place before it rejoins: what is wrong and not what is slow, as nothing is compared.
"""
FULL = tuple(CHECKS)
TOTAL_S, QUICK_S = 60.0, 20.0


def preflight(
    names: Sequence[str],
    directory: Path,
    *,
    total_s: float = TOTAL_S,
    checks: Sequence[str] = FULL,
    seed: int = 0,
    baseline: baselines.Baseline | None = None,
    repeats: int = 1,
) -> tuple[Findings, list[list[Rate]]]:
    """Measure the places within ``total_s`` seconds, and up to 25 more to end a process that the
    kernel does not let go; compare with peers and with a baseline. ``repeats``: of the rates, for a
    new baseline; the rates of each are returned too. Every process is gone afterwards, also after
    an exception such as KeyboardInterrupt.
    """
    began_s = time.monotonic()
    here = baselines.hardware(names)
    repeated: list[list[Rate]] = []
    try:
        places = Places([*names, HOST], limit_s=total_s)
    except InfrastructureError as error:
        lost = Finding(
            check="start", place=HOST, state="unmeasured", said=error.message, todo=error.hint
        )
        return Findings(findings=[lost], hardware=here), repeated
    findings: dict[tuple[str, str], Finding] = {}
    stay: list[str] = []
    try:
        for turn in range(repeats):
            now_s = time.monotonic()
            asking = Asking(
                places,
                names,
                directory,
                until_s=now_s + (began_s + total_s - now_s) / (repeats - turn),
                seed=seed,
                prefix=f"pass-{turn}/",
                cores=len(os.sched_getaffinity(0)),
            )
            # the rates alone are repeated
            asking.run([CHECKS[name] for name in checks if turn == 0 or name not in QUICK])
            repeated.append(asking.rates)
            for at, finding in compare.with_peers(asking.findings, asking.rates).items():
                if turn == 0 or finding.state == "unfit":
                    findings[at] = finding
    finally:
        stay = places.close()
    if baseline is not None:
        findings = {**compare.with_baseline(findings, repeated[0], baseline)}
    for name in stay:
        said = "its process cannot be ended: the kernel waits for its device or disk"
        findings["end", name] = Finding(check="end", place=name, state="unfit", said=said)
    seconds = time.monotonic() - began_s
    whole = Findings(
        findings=list(findings.values()), rates=repeated[0], hardware=here, seconds=seconds
    )
    return whole, repeated


def fit(
    place: str,
    checks: Sequence[str] = QUICK,
    *,
    directory: Path = Path("."),
    total_s: float = QUICK_S,
    seed: int = 0,
) -> Findings:
    """Whether one place (``cpu:2``, ``cuda:0``) is fit, in a few seconds: for a process on a
    suspect place, before it rejoins. Nothing is compared, and ``Findings.fit`` is false if nothing
    could be measured. The place must have memory free for it: a share of a GPU's free memory is
    taken. Raises ValueError for a check that there is not.
    """
    unknown = [check for check in checks if check not in FULL]
    if unknown or not math.isfinite(total_s):
        raise ValueError(
            f"no such check: {', '.join(unknown)}" if unknown else "total_s is no time"
        )
    return preflight([place], directory, total_s=total_s, checks=checks, seed=seed)[0]
