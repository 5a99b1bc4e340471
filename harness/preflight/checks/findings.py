"""What a preflight says of each place: findings, rates, and its reasons for a taint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from trainchaos.chaos import errors
from trainchaos.recovery.health.taints import MAX_TEXT, Taint

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
    is; ``measured``, ``bound``: in ``unit``, where one number decided; ``evidence``: JSON. Who asks
    for a check fills in ``check`` and ``place``.
    """

    check: str = ""
    place: str = ""
    state: State = "fit"
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

    check: str = ""
    metric: str
    place: str = ""
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
        whole = asdict(self)
        return {
            "schema_version": 1,
            "fit": self.fit,
            "seconds": round(self.seconds, 3),
            **{name: whole[name] for name in ("hardware", "findings", "rates")},
        }


def as_taints(findings: Iterable[Finding], host: str, now: datetime) -> list[Taint]:
    """What failed on a host, for the list of tainted places (``recovery.health.taints``), at
    ``now`` (UTC).

    Of a slow pair whose members are good with others, the second is named: a job without it does
    not use the link, and that both are refused would cost a good device. What all places do
    together names no place, so it taints none.
    """
    taints = []
    for one in findings:
        if one.state != "unfit" or one.place == ALL:
            continue
        first, _, second = one.place.partition(JOIN)
        said = f"preflight {one.check}: {one.said}"
        reason = "".join(char if char.isprintable() else " " for char in said)
        facts = {name: getattr(one, name) for name in ("measured", "check", "place", "unit")}
        facts["bound"] = one.bound
        taint = {
            **({"node": host} if one.place == HOST else {"device": f"{host}/{second or first}"}),
            "reason": reason if len(reason) <= MAX_TEXT else f"{reason[: MAX_TEXT - 3]}...",
            "since": now,
            "evidence": {name: value for name, value in facts.items() if value is not None},
            "by": "preflight",
        }
        taints.append(Taint.model_validate(taint))
    return taints
