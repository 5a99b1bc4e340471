"""Delta checkpoints: pieces that an older checkpoint holds already are referred to instead of
written again.

Equality is decided by size and checksum alone, so it does not matter which rank wrote the older
one, or in which lineage; a reference always leads straight to the checkpoint that holds the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint
from trainchaos.recovery.checkpoint.files.manifest import stream_of
from trainchaos.recovery.checkpoint.files.pieces import CorruptCheckpoint, Piece
from trainchaos.recovery.checkpoint.saves.part import Known, file_of


def base_of(directory: Path, step: int, writer: int, every: int) -> tuple[Known | None, int]:
    """What the newest checkpoint of the lineage before ``step`` offers ``writer``, and how many
    deltas on from a full one the next is: (None, 0) for a full one, which is every ``every``-th.
    """
    if every <= 1:
        return None, 0
    lineage, _ = checkpoints.by_lineage(directory)
    # Nothing is built on a checkpoint that did not verify: the bytes referred to may be the damaged
    # ones.
    older = next((c for c in lineage if c.step < step and not checkpoints.is_refused(c)), None)
    if older is None:
        return None, 0
    try:
        manifest = checkpoints.manifest_of(older)
        delta = int(manifest.get("delta", 0)) + 1
        if delta >= every or file_of(writer) not in manifest["files"]:
            return None, 0
        stream = stream_of(manifest, file_of(writer))
    except CorruptCheckpoint:
        return None, 0  # nothing is built on a damaged checkpoint
    return _known(older, stream), delta


def _known(older: Checkpoint, stream: list[Piece]) -> Known:
    there = {(piece.size, piece.sum): piece for piece in stream}

    def known(size: int, digest: str) -> Piece | None:
        found = there.get((size, digest))
        return found._replace(where=found.where or older.name) if found is not None else None

    return known


def missing(directory: Path, streams: Mapping[str, Sequence[Piece]]) -> str | None:
    """A referenced file that does not exist (any more), or None."""
    wanted = {
        (piece.where, name) for name, stream in streams.items() for piece in stream if piece.where
    }
    gone = (
        f"{where}/{name}"
        for where, name in sorted(wanted)
        if not (directory / where / name).is_file()
    )
    return next(gone, None)
