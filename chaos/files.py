"""Reads and writes files in directories that other programs may have changed.

Everything in a run directory may be damaged, or made by an attacker: a pipe without a writer, an
endless device, a link out of the directory, ten gigabytes of zeros, endlessly nested JSON. All such
files are read and written through this module, so that each of these is one clear error, found at
once and in bounded memory.
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

from trainchaos.chaos.errors import InfrastructureError, NewerVersion

if TYPE_CHECKING:  # ranks read and write events but do not need pydantic
    from pydantic import BaseModel

MAX_BYTES = 32 << 20
MAX_VALUES = 2_500_000  # per JSON text: an empty list of two characters takes 64 bytes of memory
SCHEMA = "schema_version"
"""Field of stored models whose files may be read by another version of this program."""
_LONGEST_REASON = 300
_LONGEST_INT = 20  # digits of 64 bits, with a sign
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")

Found = TypeVar("Found", bound="BaseModel")


def open_regular(
    path: Path, *, follow: bool = False, flags: int = os.O_RDONLY, most: float = math.inf
) -> BinaryIO:
    """Open a regular file without blocking. ``follow``: follow a symbolic link, for files named by
    a person; ``most``: maximum size in bytes. Raises OSError, whose ``strerror`` says what is there
    instead.
    """
    # Opening a pipe would block until its other end is opened.
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
    """Parse strict JSON: no NaN, no number beyond what a float holds. ``halves``: allow halves of
    surrogate pairs, which file names may contain but text to be shown must not. Raises ValueError
    for any problem.
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
    """The content of a JSON file. Raises OSError, and ValueError if it is not JSON."""
    return parse_json(read_bytes(path, follow=follow))


def read_model(path: Path, kind: type[Found], *, follow: bool = False) -> Found:
    """The content of a JSON file as a model. Raises OSError, ValueError if it does not fit the
    model, and NewerVersion if it is of a newer schema.
    """
    return parse_model(read_bytes(path, follow=follow), kind, what=path)


def parse_model(data: bytes, kind: type[Found], *, what: object = "it") -> Found:
    """A JSON text as a model. ``what``: where it is from. Raises ValueError if it does not fit the
    model, and NewerVersion if it is of a newer schema.
    """
    raw = parse_json(data)
    field = kind.model_fields.get(SCHEMA)
    version = raw.get(SCHEMA) if isinstance(raw, dict) else None
    if field is not None and type(version) is int and version > field.default:
        raise NewerVersion(what, version, field.default)
    return kind.model_validate(raw)


def reason(error: Exception) -> str:
    """Why a file could not be read, in one short line; for a model, only its first problem."""
    if hasattr(error, "errors"):  # pydantic's
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        text = f"{place}: {first['msg']}" if place else first["msg"]
    elif isinstance(error, UnicodeDecodeError):
        text = "it is not text"
    else:
        text = (
            (error.strerror if isinstance(error, OSError) else None)
            or str(error)
            or type(error).__name__
        )
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST_REASON else f"{flat[:_LONGEST_REASON]}…"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, replacing whatever has its name; the target of a link stays
    unchanged. Characters that cannot be encoded become question marks. Raises OSError.
    """
    with replacing(path) as stream:
        stream.write(text.encode(errors="replace"))


def write_json(path: Path, model: BaseModel, hint: str) -> None:
    """Write a model whole, or not at all. Raises InfrastructureError if the disk refuses."""
    text = json.dumps(model.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InfrastructureError(f"cannot write {path}: {error.strerror}", hint=hint) from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` once it is complete; after an error nothing has changed.
    Raises OSError.
    """
    # A name per process, and never an existing file: that could be a link.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with suppress(FileNotFoundError):
        temporary.unlink()  # left by an earlier process with this pid
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
    """Whether a name is a single path component: neither outside a directory nor further down."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _whole(text: str) -> int:
    if len(text) > _LONGEST_INT:
        raise ValueError("a number in it is too large")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number in it is too large")
    return value
