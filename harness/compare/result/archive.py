"""A comparison as one file: its plan, what was played, and of each run all that its report is
derived from.

Outputs of ranks, corpora and rendered reports stay out. Names of places on the machine are
replaced, so that an archive can be published: of the checkout by ``/chaos``, of the stacks'
environments by ``/stacks``, of the home directory by ``/home/user``, the host's name by ``host``.
The same report is derived from it (``chaos compare FILE.tar.xz``).
"""

from __future__ import annotations

import io
import lzma
import shutil
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Self

from chaos.errors import InfrastructureError, LogError
from chaos.files import open_regular, read_bytes, reason, replacing
from harness.compare.environments import environments
from harness.compare.environments.stack import ROOT
from harness.compare.plan.directory import Directory

MOST_BYTES = 2 * 2**30
MOST_FILES = 100_000
MOST_OF_ONE = 2**28
MOST_ABOUT = 2**16
MOST_PACKED = 2**28
OF_A_RUN = ("events", "scenario.resolved.yaml", "system.json", "results.json")
"""Of a run directory; the rest is derived from these, or says nothing about the run."""


def pack(directory: Directory, target: Path) -> Path:
    """Write the archive, whole or not at all; the same input gives the same bytes. Raises NoRun
    where there is no comparison, InfrastructureError when the disk refuses.
    """
    directory.read_plan()
    replaced = _places(directory)
    files = sorted(_files(directory))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(target) as whole,
            lzma.open(whole, "wb", preset=6) as stream,
            tarfile.open(fileobj=stream, mode="w") as tar,
        ):
            for path in files:
                data = _read(path)
                for place, name in replaced:
                    data = data.replace(place, name)
                entry = tarfile.TarInfo(path.relative_to(directory.root).as_posix())
                entry.size, entry.mode = len(data), 0o644
                tar.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {target}: {error.strerror}", hint="choose another place"
        ) from error
    return target


def _files(directory: Directory) -> Iterator[Path]:
    yield directory.plan
    yield directory.trials
    for arm, played in directory.played().items():
        yield directory.scenario(arm)
        run = directory.root / played.run
        for name in OF_A_RUN:
            place = run / name
            yield from (
                path for path in (place, *place.rglob("*")) if _is_own(path, directory.root)
            )


def _is_own(path: Path, root: Path) -> bool:
    """Whether it is a plain file that lies in the directory itself: nothing that a link leads to is
    given away.
    """
    if path.is_symlink() or not path.is_file():
        return False
    return root.resolve() in path.resolve().parents


def _read(path: Path) -> bytes:
    """Raises LogError for what no archive is made of."""
    try:
        return read_bytes(path, most=MOST_OF_ONE)
    except OSError as error:
        raise LogError(f"{path} cannot be packed: {reason(error)}") from error


def _places(directory: Directory) -> list[tuple[bytes, bytes]]:
    """What is replaced, the longest first, so that none is cut by a shorter one."""
    told = {
        str(directory.root.absolute()): "/comparison",
        str(ROOT): "/chaos",
        str(environments.root()): "/stacks",
        str(Path.home()): "/home/user",
        socket.gethostname(): "host",
    }
    longest = sorted(told, key=len, reverse=True)
    return [(place.encode(), told[place].encode()) for place in longest if len(place) > 3]


def unpack(path: Path, into: Path) -> None:
    """Unpack an archive into an empty directory. Plain files alone, below ``into``, of bounded
    number and size.

    Raises LogError for a file that is damaged, or that holds anything else.
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
                if not entry.isfile() or not _below(entry.name):
                    raise LogError(
                        f"{path}: {entry.name!r} is no plain file below it",
                        hint="it is no comparison",
                    )
                if count > MOST_FILES or total > MOST_BYTES:
                    raise LogError(
                        f"{path} is larger than {MOST_BYTES} bytes or {MOST_FILES} files"
                    )
                source = tar.extractfile(entry)
                target = into / entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with replacing(target) as written:
                    if source is not None:
                        shutil.copyfileobj(source, written)
            while stream.read(2**20):  # to the end, where a torn file shows; padding alone is left
                total += 2**20
                if total > MOST_BYTES:
                    raise LogError(f"{path} is larger than {MOST_BYTES} bytes")
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError, ValueError) as error:
        raise LogError(
            f"{path} cannot be unpacked: {reason(error)}", hint="chaos compare --archive writes one"
        ) from error


class _Entry(tarfile.TarInfo):
    """An entry of an archive. What says more about the next one (a long name) is read into memory
    as a whole, whatever its size.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """As the other; raises ValueError for such an entry that is too large."""
        found = super().frombuf(buf, encoding, errors)
        if found.type not in tarfile.REGULAR_TYPES and found.size > MOST_ABOUT:
            raise ValueError("what an entry says about another one is too large")
        return found


def _below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name
