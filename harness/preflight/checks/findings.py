"""What a preflight says of each place: findings, rates, and what of it belongs on a quarantine
list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from trainchaos.chaos import errors
from trainchaos.recovery.health.taint import MAX_TEXT, Taint

State = Literal["fit", "unfit", "unmeasured"]
HOST = "host"
"""The place of what all devices share: disk, store."""
ALL = "all"
"""The place of what all places do together."""
JOIN = "+"
"""Between the two places of a pair: ``cpu:0+cpu:1``."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check of one place. ``said``: what was measured; ``todo``: what to do, "" where nothing
    is; ``measured``, ``bound``: in ``unit``, where one number decided; ``evidence``: JSON.
    """

    check: str
    place: str
    state: State
    said: str
    todo: str = ""
    measured: float | None = None
    bound: float | None = None
    unit: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A quantity of a place that is compared with peers and with a baseline. ``rounds``: values of
    successive rounds, in ``unit``; ``high_is_good``: false of latencies; ``peers``: whether places
    of one machine should be alike in it.
    """

    check: str
    metric: str
    place: str
    rounds: Sequence[float]
    unit: str
    high_is_good: bool = True
    peers: bool = False
    todo: str = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All of one preflight. ``hardware``: as in a baseline; ``rates``: what was compared;
    ``seconds``: it took.
    """

    findings: Sequence[Finding]
    rates: Sequence[Rate] = ()
    hardware: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def unfit(self) -> list[Finding]:
        """Those that failed."""
        return [one for one in self.findings if one.state == "unfit"]

    @property
    def fit(self) -> bool:
        """Whether something was measured and nothing failed."""
        return self.exit_code == errors.EXIT_PASS

    @property
    def exit_code(self) -> int:
        """0 fit, 1 something is unfit, 7 nothing could be measured."""
        if self.unfit:
            return errors.EXIT_FAIL
        measured = any(one.state == "fit" for one in self.findings)
        return errors.EXIT_PASS if measured else errors.EXIT_SKIPPED

    def as_json(self) -> dict[str, Any]:
        """For ``--format json``."""
        return {
            "schema_version": 1,
            "fit": self.fit,
            "seconds": round(self.seconds, 3),
            "hardware": dict(self.hardware),
            "findings": [asdict(one) for one in self.findings],
            "rates": [asdict(one) for one in self.rates],
        }


def as_taints(findings: Iterable[Finding], host: str, now: datetime) -> list[Taint]:
    """What failed on a host, for the list of tainted places (``recovery.health.taints``), at
    ``now`` (UTC).

    Of a slow pair whose members are good with others, the second is named: a job without it does
    not use the link, and that both are refused would cost a good device. What all places do
    together names no place, so it taints none.
    """
    found = []
    for one in findings:
        if one.state != "unfit" or one.place == ALL:
            continue
        first, _, second = one.place.partition(JOIN)
        known = {"check": one.check, "place": one.place, "unit": one.unit, "bound": one.bound}
        evidence = {"measured": one.measured, **known}
        taint = {"reason": _short(f"preflight {one.check}: {one.said}"), "since": now}
        place = {"node": host} if one.place == HOST else {"device": f"{host}/{second or first}"}
        facts = {name: value for name, value in evidence.items() if value is not None}
        found.append(Taint.model_validate({**place, **taint, "evidence": facts, "by": "preflight"}))
    return found


def _short(text: str) -> str:
    """A text as a taint may have it."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable if len(printable) <= MAX_TEXT else f"{printable[: MAX_TEXT - 3]}..."
