"""Exports incidents as OpenTelemetry spans: one per arm, its incidents below it, and their phases
below those.

The spans are made here without OpenTelemetry; ``export`` needs its software development kit
(``trainchaos[otel]``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainchaos.chaos.errors import InfrastructureError, LogError, MissingCapability
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind, read_log
from trainchaos.chaos.units import scalar
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.reports.content.facts import struck

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

INSTALL = "install it with: pip install 'trainchaos[otel]'"
Value = str | int | float | bool
OF_AN_ARM = ("cell", "repeat", "seed", "outcome", "goodput", "committed_step")
OF_AN_INCIDENT = (
    "fault",
    "kind",
    "occurrence",
    "step",
    "landed",
    "witness",
    "healed",
    "outcome",
    "detected_by",
    "blamed_rank",
    "never_recovered",
    "steps_lost",
    "decision",
)


@dataclass(frozen=True, kw_only=True)
class OtelSpan:
    """A span. ``start_ns``, ``end_ns``: unix time; ``failed``: why it counts as an
    error, or empty.
    """

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    failed: str = ""
    children: Sequence[OtelSpan] = field(default_factory=tuple)


def spans(run: RunDirectory, results: Results) -> tuple[list[OtelSpan], list[str]]:
    """A span for each faulted arm with incidents, containing them and their phases; and a line for
    each arm left out because its log lacks its start time.

    An incident without recovery lasts until the end of its arm; one with nothing to recover from
    lasts until its detection.
    """
    found, left_out = [], []
    for arm in results.arms:
        if not (mine := struck(results, arm)):
            continue
        start = _began(run, arm)
        if start is None:
            left_out.append(f"{arm.id}: its log does not say when it began")
            continue
        found.append(_arm(results, arm, mine, start))
    return found, left_out


def export(
    found: Sequence[OtelSpan], results: Results, exporter: SpanExporter | None = None
) -> int:
    """Send spans and return how many. ``exporter``: None for OTLP over HTTP as the
    OTEL_EXPORTER_OTLP_... variables say.

    Raises MissingCapability if OpenTelemetry is not installed, InfrastructureError if the endpoint
    does not accept the spans.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
    except ImportError as error:
        raise MissingCapability(f"OpenTelemetry is not there ({error})", hint=INSTALL) from error
    resource = Resource.create({"service.name": "trainchaos", "service.version": _version(results)})
    provider, memory = (
        TracerProvider(resource=resource, shutdown_on_exit=False),
        InMemorySpanExporter(),
    )
    provider.add_span_processor(SimpleSpanProcessor(memory))
    for span in found:
        _emit(provider, span, None)
    try:
        # in one batch, without a span processor, which would hide a failed export
        if (
            memory.get_finished_spans()
            and exporter.export(memory.get_finished_spans()) is not SpanExportResult.SUCCESS
        ):
            raise InfrastructureError(
                "the spans were not accepted", hint="see OTEL_EXPORTER_OTLP_ENDPOINT"
            )
        return len(memory.get_finished_spans())
    finally:
        exporter.shutdown()
        provider.shutdown()


def _emit(provider: object, span: OtelSpan, parent: object) -> None:
    from opentelemetry import trace

    context = trace.set_span_in_context(parent) if parent is not None else None  # type: ignore[arg-type]
    tracer = provider.get_tracer("trainchaos")  # type: ignore[attr-defined]
    one = tracer.start_span(
        span.name, context=context, start_time=span.start_ns, attributes=dict(span.attributes)
    )
    if span.failed:
        one.set_status(trace.Status(trace.StatusCode.ERROR, span.failed))
    for child in span.children:
        _emit(provider, child, one)
    one.end(end_time=span.end_ns)


def _arm(results: Results, arm: ArmResult, incidents: Sequence[Incident], start: int) -> OtelSpan:
    end = start + _ns(arm.wall_s)
    return OtelSpan(
        name=f"{results.scenario} {arm.cell}",
        start_ns=start,
        end_ns=end,
        attributes=_attributes(
            scenario=results.scenario,
            run=results.run_id,
            **{name: getattr(arm, name) for name in OF_AN_ARM},
        ),
        failed="" if arm.outcome == "completed" else arm.reason or arm.outcome,
        children=tuple(_incident(i, start, end) for i in incidents),
    )


def _incident(i: Incident, start: int, arm_end: int) -> OtelSpan:
    begin = start + _ns(i.injected_s)
    lasted = i.recovery_time if i.recovery_time is not None else i.detection_time
    end = arm_end if lasted is not None and math.isinf(lasted) else begin + _ns(lasted or 0.0)
    phases = tuple(
        OtelSpan(
            name=p.name,
            start_ns=begin + _ns(p.start),
            end_ns=begin + _ns(p.start + p.seconds),
            attributes={},
        )
        for p in i.phases
    )
    return OtelSpan(
        name=f"{i.kind} {i.fault}",
        start_ns=begin,
        end_ns=max(begin, end),
        children=phases,
        attributes=_attributes(
            target=scalar(i.target),
            detection_seconds=_finite(i.detection_time),
            recovery_seconds=_finite(i.recovery_time),
            full_rate_seconds=_finite(i.time_to_full_rate),
            redundancy_seconds=_finite(i.time_to_redundancy),
            clock_bound_seconds=i.clock_bound_s,
            **{name: getattr(i, name) for name in OF_AN_INCIDENT},
        ),
        failed="" if i.outcome in ("masked", "recovered") else i.outcome,
    )


def _began(run: RunDirectory, arm: ArmResult) -> int | None:
    """Unix nanoseconds of ``run_started``: its monotonic time, converted by the clock pair of the
    log's first event.
    """
    try:
        log = read_log(Path(run.root / arm.events))
    except LogError:
        return None
    started = log.first(Kind.RUN_STARTED)
    own = log.actors[ORCHESTRATOR].events[:1] if ORCHESTRATOR in log.actors else []
    if started is None or not own or "wall_ns" not in own[0].data:
        return None
    return int(own[0].data["wall_ns"]) + started.time_ns - own[0].time_ns


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _finite(seconds: float | None) -> float | None:
    return seconds if seconds is not None and math.isfinite(seconds) else None


def _attributes(**values: Value | None) -> dict[str, Value]:
    return {f"trainchaos.{name}": value for name, value in values.items() if value is not None}


def _version(results: Results) -> str:
    return str(dict(results.system.get("versions", {})).get("trainchaos", ""))
