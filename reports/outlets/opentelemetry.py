"""Exports incidents as OpenTelemetry spans: one per arm, its incidents below it, and their phases
below those.

The spans are made here without OpenTelemetry; ``export`` needs its software development kit
(``trainchaos[otel]``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainchaos.chaos.errors import InfrastructureError, LogError, MissingCapability
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind, read_log
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.reports.content.facts import struck, target_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

INSTALL = "install it with: pip install 'trainchaos[otel]'"
Value = str | int | float | bool
OF_AN_ARM = ("cell", "repeat", "seed", "outcome", "goodput", "committed_step")
OF_AN_INCIDENT = (
    *("fault", "kind", "occurrence", "step", "landed", "witness", "healed", "outcome"),
    *("detected_by", "blamed_rank", "never_recovered", "steps_lost", "decision"),
)
SECONDS = {
    "detection_time": "detection_seconds",
    "recovery_time": "recovery_seconds",
    "time_to_full_rate": "full_rate_seconds",
    "time_to_redundancy": "redundancy_seconds",
    "clock_bound_s": "clock_bound_seconds",
}
"""Times of an incident -> attribute."""


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
    children: Sequence[OtelSpan] = ()


def spans(run: RunDirectory, results: Results) -> tuple[list[OtelSpan], list[str]]:
    """A span for each faulted arm with incidents, containing them and their phases; and a line for
    each arm left out because its log lacks its start time.

    An incident without recovery lasts until the end of its arm; one with nothing to recover from
    lasts until its detection.
    """
    made, left_out = [], []
    for arm in results.arms:
        if not (mine := struck(results, arm)):
            continue
        start = _began(run, arm)
        if start is None:
            left_out.append(f"{arm.id}: its log does not say when it began")
            continue
        end = start + _ns(arm.wall_s)
        told = {name: getattr(arm, name) for name in OF_AN_ARM}
        made.append(
            OtelSpan(
                name=f"{results.scenario} {arm.cell}",
                start_ns=start,
                end_ns=end,
                attributes=_attributes(scenario=results.scenario, run=results.run_id, **told),
                failed="" if arm.outcome == "completed" else arm.reason or arm.outcome,
                children=tuple(_incident(i, start, end) for i in mine),
            )
        )
    return made, left_out


def export(made: Sequence[OtelSpan], results: Results, exporter: SpanExporter | None = None) -> int:
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
    version = str(dict(results.system.get("versions", {})).get("trainchaos", ""))
    resource = Resource.create({"service.name": "trainchaos", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    memory = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    for span in made:
        _emit(provider.get_tracer("trainchaos"), span, None)
    try:
        # in one batch, without a span processor, which would hide a failed export
        ended = memory.get_finished_spans()
        if ended and exporter.export(ended) is not SpanExportResult.SUCCESS:
            raise InfrastructureError(
                "the spans were not accepted", hint="see OTEL_EXPORTER_OTLP_ENDPOINT"
            )
        return len(ended)
    finally:
        exporter.shutdown()
        provider.shutdown()


def _emit(tracer: Any, span: OtelSpan, parent: Any) -> None:
    from opentelemetry import trace

    context = trace.set_span_in_context(parent) if parent is not None else None
    one = tracer.start_span(
        span.name, context=context, start_time=span.start_ns, attributes=dict(span.attributes)
    )
    if span.failed:
        one.set_status(trace.Status(trace.StatusCode.ERROR, span.failed))
    for child in span.children:
        _emit(tracer, child, one)
    one.end(end_time=span.end_ns)


def _incident(i: Incident, start: int, arm_end: int) -> OtelSpan:
    begin = start + _ns(i.injected_s)
    lasted = i.recovery_time if i.recovery_time is not None else i.detection_time
    end = arm_end if lasted is not None and math.isinf(lasted) else begin + _ns(lasted or 0.0)
    phases = [(p.name, begin + _ns(p.start), begin + _ns(p.start + p.seconds)) for p in i.phases]
    times = {name: getattr(i, field) for field, name in SECONDS.items()}
    finite = {name: value for name, value in times.items() if value != math.inf}
    told = {name: getattr(i, name) for name in OF_AN_INCIDENT}
    return OtelSpan(
        name=f"{i.kind} {i.fault}",
        start_ns=begin,
        end_ns=max(begin, end),
        children=tuple(
            OtelSpan(name=name, start_ns=low, end_ns=high, attributes={})
            for name, low, high in phases
        ),
        attributes=_attributes(target=target_of(i.target), **finite, **told),
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


def _attributes(**values: Value | None) -> dict[str, Value]:
    return {f"trainchaos.{name}": value for name, value in values.items() if value is not None}
