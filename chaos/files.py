"""Reads files that another program may have written, and writes where one may have put something
else.

Everything in a run directory may be damaged, or made by an attacker: a pipe without a writer, a
device without an end, a link out of the directory, ten gigabytes of nothing, JSON that nests for
ever. All readers and writers of such files come through here, so that each of these is one clear
error, found at once and in bounded memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

if TYPE_CHECKING:  # ranks read and write events, and have no use for pydantic
    from pydantic import BaseModel

MAX_BYTES = 32 << 20
MAX_VALUES = 2_500_000  # of a JSON text: an empty list of two characters takes 64 bytes of memory
_LONGEST_REASON = 300
_LONGEST_INT = 20  # of 64 bits, with a sign
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")

Found = TypeVar("Found", bound="BaseModel")


def open_regular(
    path: Path, *, follow: bool = False, flags: int = os.O_RDONLY, most: float = math.inf
) -> BinaryIO:
    """Open a regular file without blocking. ``follow``: where a person has named the file, which
    may well be a link then; ``most``: bytes that it may hold. Raises OSError, whose ``strerror``
    says what is there instead.
    """
    # A pipe would wait for its other end.
    more = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags | more)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from error
        raise
    except ValueError as error:  # a null character in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    if found.st_size > most:
        os.close(fd)
        words = (
            f"holds {found.st_size / 1e6:.0f} MB, more than the {most / 1e6:.0f} MB that are read"
        )
        raise OSError(errno.EFBIG, words, str(path))
    return os.fdopen(fd, "rb" if flags == os.O_RDONLY else "r+b")


def read_bytes(path: Path, *, most: int = MAX_BYTES, follow: bool = False) -> bytes:
    """All of a regular file of at most ``most`` bytes. Raises OSError."""
    with open_regular(path, follow=follow, most=most) as stream:
        return stream.read(most)


def parse_json(data: bytes, *, halves: bool = False) -> Any:
    """JSON as its standard has it: no NaN, no number beyond what a float holds. ``halves``: of
    surrogate pairs, which names of files may hold, and nothing that is to be shown. Raises
    ValueError, whatever is wrong.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} values")
    try:
        found = json.loads(
            data.decode(), parse_constant=_no_number, parse_float=_finite, parse_int=_whole
        )
        if not halves and _HALF.search(data):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text in it holds half of a surrogate pair") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return found


def read_json(path: Path, *, follow: bool = False) -> Any:
    """What a JSON file holds. Raises OSError, and ValueError for what is no JSON."""
    return parse_json(read_bytes(path, follow=follow))


def read_model(path: Path, kind: type[Found], *, follow: bool = False) -> Found:
    """What a JSON file holds, as a model. Raises OSError, and ValueError for a file of another
    form.
    """
    return parse_model(read_bytes(path, follow=follow), kind)


def parse_model(data: bytes, kind: type[Found]) -> Found:
    """A JSON text as a model. Raises ValueError for one of another form."""
    return kind.model_validate(parse_json(data))


def reason(error: Exception) -> str:
    """Why a file could not be read, in one short line; of many things that are wrong with a model
    the first.
    """
    if hasattr(error, "errors"):  # pydantic's
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        text = f"{place}: {first['msg']}" if place else first["msg"]
    elif isinstance(error, UnicodeDecodeError):
        text = "it is no text"
    else:
        text = (
            (error.strerror if isinstance(error, OSError) else None)
            or str(error)
            or type(error).__name__
        )
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST_REASON else f"{flat[:_LONGEST_REASON]}…"


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all, in place of whatever has its name: what a link leads to
    stays as it is. What no encoding takes becomes a question mark. Raises OSError.
    """
    with replacing(path) as stream:
        stream.write(text.encode(errors="replace"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name of another when it is complete; left by an error, nothing has
    changed. Raises OSError.
    """
    # A name of its own for each process, and never a file that is there already: that could be a
    # link.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with suppress(FileNotFoundError):
        temporary.unlink()  # of an earlier process with this number
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    try:
        with os.fdopen(fd, "wb") as stream:
            yield stream
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def is_part(name: str) -> bool:
    """Whether a text names something directly below a directory: no way out of it, and no way
    further down.
    """
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _whole(text: str) -> int:
    if len(text) > _LONGEST_INT:
        raise ValueError("a number in it is too large")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number in it is too large")
    return value
