"""A committed checkpoint goes bad on disk."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from chaos.events import Event, Kind
from chaos.fault import Fault, Landed, Occurrence, Where
from chaos.targets import CheckpointTarget

_MANIFEST = "manifest.json"


class CheckpointCorrupt(Fault):
    """Changes files of a committed checkpoint: bit rot, a lost block, a sync gone wrong. Real file surgery.

    ``mode``: bitflip (one bit of the data), truncate (half the data file), missing (data file deleted),
    stale (data of an older checkpoint, or of zeros when there is none, under the new manifest). Landed: an
    independent verification complains.
    """

    where: ClassVar[Where] = Where.CHECKPOINT
    harmless: ClassVar[bool] = True

    mode: Literal["bitflip", "truncate", "missing", "stale"] = "bitflip"

    def act(self, target: CheckpointTarget) -> Mapping[str, Any]:
        """Change its largest data file."""
        victim = _largest(target.path)
        done: dict[str, Any] = {"file": victim.name, "mode": self.mode}
        if self.mode == "bitflip":
            place = random.Random(target.seed).randrange(victim.stat().st_size)
            with open(victim, "rb+") as stream:
                stream.seek(place)
                byte = stream.read(1)[0]
                stream.seek(place)
                stream.write(bytes((byte ^ 0x10,)))
            done["byte"] = place
        elif self.mode == "truncate":
            size = victim.stat().st_size // 2
            with open(victim, "rb+") as stream:
                stream.truncate(size)
            done["bytes"] = size
        elif self.mode == "missing":
            victim.unlink()
        else:
            done["from"] = _make_stale(victim, target.older)
        return done

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The checkpoint verifier's complaint."""
        for event in events:
            if event.kind is Kind.FAULT_EFFECT and event.data["fault"] == occurrence.fault:
                complaint = event.data["evidence"].get("verifier")
                if event.data["occurrence"] == occurrence.number and complaint:
                    return Landed(witness="checkpoint verifier", evidence={"complaint": complaint})
        return None


def _largest(path: Path) -> Path:
    return max((p for p in path.iterdir() if p.name != _MANIFEST), key=lambda p: p.stat().st_size)


def _make_stale(victim: Path, older: Path | None) -> str:
    """Put an older checkpoint's data in place; it must differ, or nothing would have happened."""
    if older is not None:
        source = older / victim.name
        if source.is_file():
            shutil.copyfile(source, victim)
            return older.name
    size = victim.stat().st_size
    victim.write_bytes(bytes(size))
    return "zeros"
