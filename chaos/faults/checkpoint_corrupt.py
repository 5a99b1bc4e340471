"""Corrupts a committed checkpoint on disk, or breaks the next save."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.aftermath import Consequence, Ends, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import CheckpointTarget
from trainchaos.chaos.fault.witness import effects

_MANIFEST = "manifest.json"


class CheckpointCorrupt(Fault):
    """Damages the files of a committed checkpoint: bit rot, a lost block, a failed sync. Real: the
    files on disk are changed.

    ``mode``: bitflip (flips one bit of the data), truncate (cuts the data file in half), missing
    (deletes the data file), stale (puts an older checkpoint's data under the new manifest, or zeros
    when there is no older one), swap-shard (exchanges two data files, or the only one with an older
    checkpoint's). Landed: an independent verification of the checkpoint fails. Two modes hit the
    next save instead: torn kills the saving process during the save; lose-unsynced imitates the
    loss of its machine, so unsynced files are empty afterwards. ``stage`` says when: data (while
    data is written), manifest (before the manifest), rename (before the rename), renamed (just
    after it). The saving process is rank 0's, or, with a sharded checkpoint, that of the target's
    ``rank``; its part has a record instead of a manifest and no further rename. Landed: the kernel
    reports the process killed, and its log shows a save that began and did not end.
    """

    where: ClassVar[Where] = Where.CHECKPOINT
    simulated: ClassVar[bool] = True
    harmless: ClassVar[bool] = True
    beside_steps: ClassVar[bool] = True

    mode: Literal[
        "bitflip", "truncate", "missing", "stale", "swap-shard", "torn", "lose-unsynced"
    ] = "bitflip"
    stage: Literal["data", "manifest", "rename", "renamed"] | None = None

    @model_validator(mode="after")
    def _stage_of_a_save(self) -> CheckpointCorrupt:
        if self.stage is not None and not self.hits_next_save:
            raise ValueError(f"stage is for the modes torn and lose-unsynced, not for {self.mode}")
        return self

    @property
    def hits_next_save(self) -> bool:
        """Whether it hits the next save instead of existing files."""
        return self.mode in ("torn", "lose-unsynced")

    def act(self, target: CheckpointTarget) -> Mapping[str, Any]:
        """Damage the largest data file, or make the next save fail."""
        if self.hits_next_save:
            stage = self.stage or "rename"
            target.break_next_save(stage, lose_unsynced=self.mode == "lose-unsynced")
            return {"mode": self.mode, "stage": stage}
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
        elif self.mode == "swap-shard":
            done["with"] = _swap(victim, target.older)
        else:
            done["from"] = _make_stale(victim, target.older)
        return done

    def follows(self) -> tuple[Consequence, ...]:
        """The saving process ends. The ``checkpoint-integrity`` invariant checks that a damaged
        checkpoint is never restored.
        """
        return (Ends(signal=signal.SIGKILL),) if self.hits_next_save else ()

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The checkpoint verifier's complaint; for a save, the kill before it finished."""
        if self.hits_next_save:
            return _killed_in_save(occurrence, events)
        for _, seen in effects(occurrence, events):
            if complaint := seen.get("verifier"):
                return Landed(witness="checkpoint verifier", evidence={"complaint": complaint})
        return None


def _largest(path: Path) -> Path:
    """The largest data file. Raises FileNotFoundError when earlier faults left no data
    in any file.
    """
    files = [path] if path.is_file() else [p for p in path.iterdir() if p.name != _MANIFEST]
    sizes = {p: p.stat().st_size for p in files}  # a command's checkpoint may be a single file
    if not any(sizes.values()):
        raise FileNotFoundError("no data is left in it")
    return max(sizes, key=sizes.__getitem__)


def _killed_in_save(occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
    """The reaped exit status, and the victim's log entry that it was saving."""
    saving: str | None = None
    for event in (e for e in events if e.actor == occurrence.process):
        part = event.data["state"] if event.kind is Kind.CHECKPOINT_PART else ""
        if event.kind is Kind.CHECKPOINT_SAVING or part == "begun":
            saving = event.data["checkpoint"]
        elif event.kind in (Kind.CHECKPOINT_COMMITTED, Kind.CHECKPOINT_FAILED) or part:
            saving = None
    for event in events:
        if event.kind is Kind.PROCESS_EXITED and event.data["process"] == occurrence.process:
            if event.data["signal"] != signal.SIGKILL or saving is None:
                return None
            return Landed(witness="kernel: wait status", evidence={"signal": 9, "saving": saving})
    return None


def _swap(victim: Path, older: Path | None) -> str:
    """Swap the file with another data file of its checkpoint, or with the same file of an older
    checkpoint.
    """
    others = sorted(
        p
        for p in victim.parent.glob(f"*{victim.suffix}")
        if p not in (victim, victim.parent / _MANIFEST)
    )
    if older is not None and (older / victim.name).is_file():
        others.append(older / victim.name)
    if not others:
        raise FileNotFoundError("there is no other data file to swap it with")
    other, spare = others[0], victim.parent / ".swap"
    victim.rename(spare)
    other.rename(victim)
    spare.rename(other)
    return f"{other.parent.name}/{other.name}"


def _make_stale(victim: Path, older: Path | None) -> str:
    """Replace the file with an older checkpoint's data, or with zeros; the content must change for
    the fault to have an effect.
    """
    if older is not None:
        source = older / victim.name
        if source.is_file():
            shutil.copyfile(source, victim)
            return older.name
    size = victim.stat().st_size
    victim.write_bytes(bytes(size))
    return "zeros"
