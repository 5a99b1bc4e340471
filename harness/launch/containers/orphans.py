"""What is left in a container engine of runs that are over, or whose directories are gone with the
ledgers in them.

The one happens when a harness ends at once, on a second signal, while the engine is still at what
it was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from chaos.errors import InfrastructureError
from harness.host.container_engine import (
    DIRECTORY_LABEL,
    HOLDER_LABEL,
    RUN_LABEL,
    asking,
    connect,
    engine_url,
)
from harness.undo.containers import RemoveContainers, RemoveNetworks
from harness.undo.live import FILE, Holder


def orphans() -> list[tuple[Path, list[RemoveContainers | RemoveNetworks]]]:
    """Where each such run was, and how to remove what it has left; none where no engine can be
    asked.

    A run that is not over heals by its ledger; one whose harness lives, or that this process cannot
    judge since it ran in another container, is left alone.
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


def _labels() -> Iterator[tuple[str, tuple[Path, Holder]]]:
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
            holder = Holder.model_validate_json(labels.get(HOLDER_LABEL, ""))
        except ValidationError:
            continue  # of another version: nobody knows whether its harness lives
        yield labels[RUN_LABEL], (Path(labels.get(DIRECTORY_LABEL, "/")), holder)
