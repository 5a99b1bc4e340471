"""Makes and removes the environments of stacks.

An install that fails, is interrupted or is killed leaves nothing that counts as ready: the mark is
written last, a failed install removes its files, and the next install removes what a killed one
left. Only one install at a time makes an environment; pip holds the lock too, so the next install
waits for a pip whose chaos was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError, ScenarioError
from trainchaos.harness.compare.environments import environments
from trainchaos.harness.compare.environments.environments import MARK, OWNED, Environment, ReadyMark
from trainchaos.harness.compare.environments.stack import Requirements

LIMIT_S = 1800.0
"""Time limit of one command."""
END_LIMIT_S = 10.0
LOOK_S = 0.5
SHOWN_LINES = 12
Say = Callable[[str], None]
"""Callback for progress: a short line, called repeatedly."""
_HINTS = (
    (
        "No space left on device",
        "free disk space, or set TRAINCHAOS_STACKS to a directory with more",
    ),
    ("ResolutionImpossible", "correct the pins of the stack in harness/stacks"),
    ("conflicting dependencies", "correct the pins of the stack in harness/stacks"),
    (
        "No matching distribution",
        "correct the pins of the stack in harness/stacks, or use another Python",
    ),
    ("requires a different Python", "use another Python"),
    ("NewConnectionError", "no package index answers: see the network, and pip config list"),
    ("name resolution", "no package index answers: see the network, and pip config list"),
    ("ReadTimeoutError", "the package index is slow: try again"),
)


def install(name: str, say: Say, *, base: Path = Path(sys.executable)) -> Environment:
    """Make the environment of a stack ready, if it is not. ``base``: the Python it is made with.

    Waits while another install makes the same. Raises ScenarioError when this Python or the pins do
    not fit, with pip's own words; InfrastructureError when a command fails otherwise or takes too
    long.
    """
    found = environments.look(name)
    requirements = environments.find(name).requirements
    if found.ready or requirements is None or found.directory is None:
        return found
    if unable := environments.unfit(requirements):
        raise ScenarioError(
            f"stack {name}: {unable}", hint="make chaos's own environment with such a Python"
        )
    with _locked(found.directory, say) as lock:
        if environments.look(name).ready:
            return environments.look(name)
        _make(name, found.directory, requirements, say, base=base, lock=lock)
    return environments.look(name)


def remove(name: str) -> Path | None:
    """Delete the environment of a stack; returns where it was, None when there was none. Raises
    InfrastructureError while it is being installed.
    """
    directory = environments.look(name).directory
    if directory is None or not directory.exists():
        return None
    with _locked(directory, None):
        _clear(directory)
    return directory


def _make(
    name: str, directory: Path, requirements: Requirements, say: Say, *, base: Path, lock: int
) -> None:
    began = time.monotonic()
    log = directory.with_name(f"{directory.name}.log")
    python = environments.interpreter(directory)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    alone = list(requirements.without_dependencies)
    pins = [pin for pin in environments.wanted(requirements) if pin not in alone]
    named = {environments.package_of(pin) for pin in pins}
    below = [
        pin
        for pin in environments.pinned(environments.BELOW_THEM)
        if environments.package_of(pin) not in named
    ]
    try:
        _clear(directory)
        directory.mkdir()
        (directory / OWNED).touch()
        log.unlink(missing_ok=True)
        run = _Runner(name, log, say, lock)
        run("an empty environment", [str(base), "-m", "venv", str(directory)])
        constraints = directory / "constraints.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in below))
        install = [*pip, "install", "--progress-bar", "off"]
        run(f"{len(pins)} pinned packages", [*install, "--constraint", str(constraints), *pins])
        if alone:
            run(", ".join(alone), [*install, "--no-deps", *alone])
        modules = ["torch", *([requirements.probe] if requirements.probe else [])]
        run(
            "a first import",
            [str(python), "-c", "".join(f"import {module}\n" for module in modules)],
        )
        _write_mark(
            directory, python, environments.wanted(requirements), seconds=time.monotonic() - began
        )
    except BaseException:
        _clear(directory)
        raise
    log.unlink(missing_ok=True)


def _versions(python: Path) -> dict[str, str]:
    """Versions of all installed packages."""
    listed = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=_environment(),
    )
    if listed.returncode:
        raise InfrastructureError(
            f"{python} -m pip list: {listed.stderr.strip()[-300:]}", hint="try again"
        )
    return {row["name"]: row["version"] for row in json.loads(listed.stdout)}


def _write_mark(directory: Path, python: Path, wanted: list[str], *, seconds: float) -> None:
    version, versions = _python_of(directory), _versions(python)
    mark = ReadyMark(wanted=wanted, python=version, versions=versions, seconds=round(seconds, 1))
    temporary = directory / f".{MARK}"
    temporary.write_text(mark.model_dump_json(indent=1))
    temporary.replace(directory / MARK)


class _Runner:
    """Runs the commands of an install; their output goes to a log file."""

    def __init__(self, name: str, log: Path, say: Say, lock: int) -> None:
        self._name, self._log, self._say, self._lock = name, log, say, lock

    def __call__(self, what: str, argv: Sequence[str]) -> None:
        """Raises ScenarioError with pip's words when versions clash, InfrastructureError
        otherwise.
        """
        began = time.monotonic()
        try:
            with self._log.open("ab") as out:
                start = out.tell()
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,
                    pass_fds=[self._lock],
                )
        except OSError as error:
            raise InfrastructureError(
                f"{argv[0]} cannot be started: {error.strerror}", hint="see the disk"
            ) from error
        try:
            self._say(f"{self._name}: {what}")
            while process.poll() is None:
                spent = time.monotonic() - began
                self._say(f"{self._name}: {what} ({spent:.0f} s) {_last_line(self._log)}")
                if spent > LIMIT_S:
                    raise InfrastructureError(
                        f"{what} of {self._name} took more than {LIMIT_S:.0f} s",
                        hint=f"see {self._log}",
                    )
                try:
                    process.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            _end(process)
        if process.returncode:
            self._fail(what, self._log.read_bytes()[start:].decode(errors="replace"))

    def _fail(self, what: str, text: str) -> None:
        said = "\n  ".join(pip_words(text))
        message = f"{what} of stack {self._name} could not be installed:\n  {said}"
        hint = next((hint for sign, hint in _HINTS if sign in text), "")
        kind = ScenarioError if hint.startswith(("correct", "use another")) else InfrastructureError
        raise kind(message, hint=f"{hint or 'try again'}; all that was said is in {self._log}")


def pip_words(text: str) -> list[str]:
    """pip's error messages, at most ``SHOWN_LINES`` lines; the last lines of the output if they are
    not pip's.
    """
    lines = [
        line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()
    ]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    errors = [
        re.sub(r" \(from versions: .*\)", "", line)
        for line in errors
        if "ResolutionImpossible" not in line
    ]
    caused = next(
        (index for index, line in enumerate(lines) if line.startswith("The conflict is caused by")),
        None,
    )
    if caused is not None:
        for line in lines[caused + 1 :]:
            if not line.startswith(" "):
                break
            errors.append(line.strip())
    return (list(dict.fromkeys(errors)) or lines[-3:] or ["it said nothing"])[:SHOWN_LINES]


@contextmanager
def _locked(directory: Path, say: Say | None) -> Iterator[int]:
    """Hold the lock of an environment; yields its descriptor. ``say``: None to fail instead of
    waiting.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(
            directory.with_name(f".{directory.name}.lock"),
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
            0o644,
        )
    except OSError as error:
        raise InfrastructureError(
            f"cannot write to {directory.parent}: {error.strerror}",
            hint="set TRAINCHAOS_STACKS to another directory",
        ) from error
    try:
        began = time.monotonic()
        while not _taken(lock):
            if say is None:
                raise InfrastructureError(
                    f"{directory} is being installed", hint="wait until that is done"
                )
            spent = time.monotonic() - began
            if spent > LIMIT_S:
                raise InfrastructureError(
                    f"another install of {directory} does not end", hint="end it"
                )
            say(f"{directory.name}: another install of it is under way, waiting ({spent:.0f} s)")
            time.sleep(LOOK_S)
        yield lock
    finally:
        os.close(lock)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _python_of(directory: Path) -> str:
    """The environment's Python version, from its ``pyvenv.cfg``."""
    try:
        lines = (directory / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        lines = []
    said = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
    return said.get("version", platform.python_version())


def _clear(directory: Path) -> None:
    """Remove an environment: the ready mark first, the ownership marker last."""
    if not directory.exists():
        return
    if not (directory / OWNED).exists() and any(directory.iterdir()):
        raise InfrastructureError(
            f"{directory} was not made by chaos stacks install",
            hint="move it away, or set TRAINCHAOS_STACKS",
        )
    (directory / MARK).unlink(missing_ok=True)
    try:
        for path in directory.iterdir():
            if path.name != OWNED:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (directory / OWNED).unlink(missing_ok=True)
        directory.rmdir()
    except OSError as error:
        raise InfrastructureError(
            f"cannot remove {directory}: {error.strerror}", hint="remove it by hand"
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill pip's whole session, as pip starts other processes. This is done before pip is reaped,
    while its pid cannot be reused.
    """
    if process.returncode is None:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
        process.wait(END_LIMIT_S)


def _last_line(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 400))
        lines = stream.read().decode(errors="replace").splitlines()
    return lines[-1].strip()[:70] if lines else ""


def _environment() -> dict[str, str]:
    """Environment for pip without the caller's Python settings, whose PYTHONPATH would shadow
    installed packages.
    """
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    return {name: value for name, value in os.environ.items() if name not in left_out}
