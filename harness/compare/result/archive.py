"""Packs a comparison into one file: its plan, the arms played, and everything from which its report
is derived.

Outputs of ranks, corpora and rendered reports are left out. Paths and names of the machine are
replaced, so that an archive can be published: the checkout becomes ``/chaos``, the stacks'
environments ``/stacks``, the home directory ``/home/user``, and the host name ``host``. Each run is
sealed anew, as its files are other ones then. ``chaos compare FILE.tar.xz`` derives the same report
from it.
"""

from __future__ import annotations

import io
import lzma
import shutil
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from trainchaos.chaos.errors import InfrastructureError, LogError
from trainchaos.chaos.files import open_regular, read_bytes, reason, replacing
from trainchaos.chaos.home import HOME
from trainchaos.harness.compare.environments import environments
from trainchaos.harness.compare.plan.directory import Directory
from trainchaos.harness.host import seal
from trainchaos.harness.host.rundir import RunDirectory

MOST_BYTES = 2 * 2**30
MOST_FILES = 100_000
MOST_OF_ONE = 2**28
MOST_ABOUT = 2**16
MOST_PACKED = 2**28
OF_A_RUN = ("events", "scenario.resolved.yaml", "system.json", "results.json")
"""Files taken from a run directory; the rest is derived from these, or not about the run."""


def pack(directory: Directory, target: Path) -> Path:
    """Write the archive atomically; the same input gives the same bytes. Raises NoRun if there is
    no comparison, LogError for a file that cannot be packed, InfrastructureError if the archive
    cannot be written.
    """
    directory.read_plan()
    root, replaced = directory.root, _places(directory)
    played = directory.played()
    runs = {root / one.run for one in played.values()}
    files = {directory.plan, directory.trials, *map(directory.scenario, played)}
    files |= {path for run in runs for path in _of_run(run, root)}
    sealed: dict[Path, dict[str, seal.SealedFile]] = {}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(target) as whole,
            lzma.open(whole, "wb", preset=6) as stream,
            tarfile.open(fileobj=stream, mode="w") as tar,
        ):
            for path in sorted(files):
                data = _read(path)
                for place, name in replaced:
                    data = data.replace(place, name)
                _add(tar, path.relative_to(root).as_posix(), data)
                run = next((run for run in runs if path.is_relative_to(run)), None)
                if run is not None and path.name != "results.json":
                    own = path.relative_to(run).as_posix()
                    sealed.setdefault(run, {})[own] = seal.of_bytes(data)
            for run, its in sorted(sealed.items()):
                named = (run.relative_to(root) / seal.FILE).as_posix()
                _add(tar, named, seal.again(RunDirectory(run), its).encode())
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {target}: {error.strerror}", hint="choose another place"
        ) from error
    return target


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))


def _of_run(run: Path, root: Path) -> Iterator[Path]:
    """Plain files inside the comparison itself, so that no target of a link is published."""
    for place in (run / name for name in OF_A_RUN):
        for path in (place, *place.rglob("*")):
            inside = path.resolve().is_relative_to(root.resolve())
            if inside and path.is_file() and not path.is_symlink():
                yield path


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, most=MOST_OF_ONE)
    except OSError as error:
        raise LogError(f"{path} cannot be packed: {reason(error)}") from error


def _places(directory: Directory) -> list[tuple[bytes, bytes]]:
    """Paths to replace -> replacements, longest first, so that no shorter one cuts a longer one."""
    replacements = {
        str(directory.root.absolute()): "/comparison",
        str(HOME): "/chaos",
        str(environments.root()): "/stacks",
        str(Path.home()): "/home/user",
        socket.gethostname(): "host",
    }
    longest = sorted(replacements, key=len, reverse=True)
    return [(place.encode(), replacements[place].encode()) for place in longest if len(place) > 3]


def unpack(path: Path, into: Path) -> None:
    """Unpack an archive into an empty directory. Accepts only plain files below ``into``, of
    bounded number and size.

    Raises LogError for a damaged file, or one that contains anything else.
    """
    count = total = 0
    try:
        with (
            open_regular(path, follow=True, most=MOST_PACKED) as packed,
            lzma.open(packed, "rb") as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_Entry) as tar,
        ):
            for entry in tar:
                count, total = count + 1, total + entry.size
                target = into / entry.name
                if not entry.isfile() or not target.resolve().is_relative_to(into.resolve()):
                    raise LogError(
                        f"{path}: {entry.name!r} is not a plain file below it",
                        hint="it is not a comparison",
                    )
                if count > MOST_FILES or total > MOST_BYTES:
                    raise ValueError(f"it is larger than {MOST_BYTES} bytes or {MOST_FILES} files")
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(entry)
                with replacing(target) as written:
                    if source is not None:
                        shutil.copyfileobj(source, written)
            while stream.read(2**20):  # to the end, where a torn file shows; padding alone is left
                total += 2**20
                if total > MOST_BYTES:
                    raise ValueError(f"it is larger than {MOST_BYTES} bytes")
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError, ValueError) as error:
        raise LogError(
            f"{path} cannot be unpacked: {reason(error)}", hint="chaos compare --archive writes one"
        ) from error


class _Entry(tarfile.TarInfo):
    """An entry of an archive. tarfile reads an entry that describes the next one (a long name) into
    memory as a whole, so its size is limited here.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type not in tarfile.REGULAR_TYPES and found.size > MOST_ABOUT:
            raise ValueError("what an entry says about another one is too large")
        return found
