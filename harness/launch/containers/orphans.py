"""Remains in a container engine of runs that are over, or whose directories and ledgers are gone.

The former happens if a harness exits at once, on a second signal, while the engine is still
carrying out a request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.container_engine import (
    DIRECTORY_LABEL,
    HOLDER_LABEL,
    RUN_LABEL,
    asking,
    connect,
    engine_url,
)
from trainchaos.harness.undo.containers import RemoveContainers, RemoveNetworks
from trainchaos.harness.undo.live import FILE, HarnessProcess


def orphans() -> list[tuple[Path, list[RemoveContainers | RemoveNetworks]]]:
    """Directory of each such run, and records that remove its remains; empty if the engine is
    unreachable.

    Skipped: runs that are not over, which heal by their ledgers; runs whose harness is alive; and
    runs of another container, which this process cannot judge.
    """
    if not os.path.exists(engine_url().removeprefix("unix://")):
        return []
    try:
        found = dict(_labels())
    except InfrastructureError:
        return []
    return [
        (
            place,
            [kind(engine=engine_url(), run=marker) for kind in (RemoveContainers, RemoveNetworks)],
        )
        for marker, (place, holder) in sorted(found.items())
        if not (place / FILE).exists() and holder.here and not holder.alive
    ]


def _labels() -> Iterator[tuple[str, tuple[Path, HarnessProcess]]]:
    client = connect()
    try:
        with asking("list what runs have made"):
            sign = {"label": RUN_LABEL}
            made = [
                each.labels
                for each in client.containers.list(all=True, filters=sign, ignore_removed=True)
            ]
            made += [each.attrs["Labels"] for each in client.networks.list(filters=sign)]
    finally:
        client.close()
    for labels in made:
        try:
            holder = HarnessProcess.model_validate_json(labels.get(HOLDER_LABEL, ""))
        except ValidationError:
            continue  # of another version: its harness may be alive
        yield labels[RUN_LABEL], (Path(labels.get(DIRECTORY_LABEL, "/")), holder)
