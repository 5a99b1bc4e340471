"""``chaos export``: sends a run's results to other systems."""

from __future__ import annotations

from pathlib import Path

import click

from trainchaos.chaos.commands.shared.options import RUN
from trainchaos.chaos.commands.shared.say import say


@click.group()
def export() -> None:
    """Send the results of a stored run to other systems."""


@export.command()
@click.argument("run", type=RUN)
def otel(run: Path) -> None:
    """Send incidents and their phases as OpenTelemetry spans, by OTLP over HTTP.

    OTEL_EXPORTER_OTLP_ENDPOINT sets the destination, as for any program. Exit code 7: OpenTelemetry
    is not installed.
    """
    from trainchaos.harness.host.rundir import open_run
    from trainchaos.harness.judge.verdict.judge import judge_whole
    from trainchaos.reports.outlets import opentelemetry

    directory = open_run(run)
    results = judge_whole(directory)
    found, left_out = opentelemetry.spans(directory, results)
    sent = opentelemetry.export(found, results)
    say(f"{sent} spans of {len(found)} arms")
    for line in left_out:
        say(f"left out: {line}", err=True)


COMMANDS = [export]
