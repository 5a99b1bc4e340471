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
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError, ScenarioError
from trainchaos.chaos.files import write_whole
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
_OF_THE_PINS = (
    "ResolutionImpossible",
    "conflicting dependencies",
    "No matching distribution",
    "requires a different Python",
)
"""Words of pip by which another try of the same pins with the same Python is in vain."""
_SHADOWING = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
"""Variables that would shadow what pip installs."""


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
        if not environments.look(name).ready:
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
    python = str(environments.interpreter(directory))
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wanted, alone = environments.wanted(requirements), list(requirements.without_dependencies)
    pins = [pin for pin in wanted if pin not in alone]
    named = {environments.package_of(pin) for pin in pins}
    below = environments.pinned(environments.BELOW_THEM)

    def run(what: str, argv: Sequence[str]) -> str:
        return _run(f"{name}: {what}", argv, log, say, lock)

    try:
        _clear(directory)
        directory.mkdir()
        (directory / OWNED).touch()
        log.unlink(missing_ok=True)
        run("an empty environment", [str(base), "-m", "venv", str(directory)])
        constraints = directory / "constraints.txt"
        kept = (pin for pin in below if environments.package_of(pin) not in named)
        constraints.write_text("".join(f"{pin}\n" for pin in kept))
        install = [*pip, "install", "--progress-bar", "off"]
        run(f"{len(pins)} pinned packages", [*install, "--constraint", str(constraints), *pins])
        if alone:
            run(", ".join(alone), [*install, "--no-deps", *alone])
        modules = ["torch", *filter(None, [requirements.probe])]
        run("a first import", [python, "-c", "\n".join(f"import {one}" for one in modules)])
        listed = run("its versions", [*pip, "list", "--format", "json"])
        rows = json.loads(listed[listed.index("[") :])
        mark = ReadyMark(
            wanted=wanted,
            python=_python_of(directory),
            versions={row["name"]: row["version"] for row in rows},
            seconds=round(time.monotonic() - began, 1),
        )
        write_whole(directory / MARK, mark.model_dump_json(indent=1))
    except BaseException:
        _clear(directory)
        raise
    log.unlink(missing_ok=True)


def _run(what: str, argv: Sequence[str], log: Path, say: Say, lock: int) -> str:
    """Run a command, whose output goes to the log; returns it. Raises ScenarioError with pip's
    words where the pins do not fit, InfrastructureError otherwise.
    """
    began = time.monotonic()
    env = {name: value for name, value in os.environ.items() if name not in _SHADOWING}
    try:
        with log.open("ab") as out:
            start = out.tell()
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                pass_fds=[lock],
            )
    except OSError as error:
        raise InfrastructureError(
            f"{argv[0]} cannot be started: {error.strerror}", hint="see the disk"
        ) from error
    try:
        say(what)
        while process.poll() is None:
            spent = time.monotonic() - began
            last = log.read_bytes()[-400:].decode(errors="replace").splitlines() or [""]
            say(f"{what} ({spent:.0f} s) {last[-1].strip()[:70]}")
            if spent > LIMIT_S:
                raise InfrastructureError(
                    f"{what} took more than {LIMIT_S:.0f} s", hint=f"see {log}"
                )
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
    finally:
        _end(process)
    text = log.read_bytes()[start:].decode(errors="replace")
    if process.returncode:
        unfit = any(sign in text for sign in _OF_THE_PINS)
        hint = "see the disk, the network and pip config list, and try again"
        if unfit:
            hint = "correct the pins of the stack in harness/compare/stacks, or use another Python"
        message = "\n  ".join([f"{what} could not be installed:", *pip_words(text)])
        kind = ScenarioError if unfit else InfrastructureError
        raise kind(message, hint=f"{hint}; all that was said is in {log}")
    return text


def pip_words(text: str) -> list[str]:
    """pip's error messages and what it says to be in conflict, at most ``SHOWN_LINES`` lines; the
    last lines of the output if they are not pip's.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m| \(from versions: .*\)", "", text)
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    errors = [line for line in errors if "ResolutionImpossible" not in line]
    cause = re.search(r"The conflict is caused by.*\n((?: +.*\n)+)", plain)
    errors += [line.strip() for line in cause[1].splitlines()] if cause else []
    return (list(dict.fromkeys(errors)) or lines[-3:] or ["it said nothing"])[:SHOWN_LINES]


@contextmanager
def _locked(directory: Path, say: Say | None) -> Iterator[int]:
    """Hold the lock of an environment; yields its descriptor. ``say``: None to fail instead of
    waiting.
    """
    path = directory.with_name(f".{directory.name}.lock")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InfrastructureError(
            f"cannot write to {directory.parent}: {error.strerror}",
            hint="set TRAINCHAOS_STACKS to another directory",
        ) from error
    try:
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                spent = time.monotonic() - began
            if say is None or spent > LIMIT_S:
                raise InfrastructureError(f"{directory} is being installed", hint="wait for it")
            say(f"{directory.name}: another install of it is under way, waiting ({spent:.0f} s)")
            time.sleep(LOOK_S)
        yield lock
    finally:
        os.close(lock)


def _python_of(directory: Path) -> str:
    """The environment's Python version, from its ``pyvenv.cfg``; this one's if it does not say."""
    with suppress(OSError):
        found = re.search(r"^version\s*=\s*(\S+)", (directory / "pyvenv.cfg").read_text(), re.M)
        if found:
            return found[1]
    return sys.version.split()[0]


def _clear(directory: Path) -> None:
    """Remove an environment: the ready mark first, the ownership marker last."""
    if not directory.exists():
        return
    if not (directory / OWNED).exists() and any(directory.iterdir()):
        raise InfrastructureError(
            f"{directory} was not made by chaos stacks install",
            hint="move it away, or set TRAINCHAOS_STACKS",
        )
    try:
        (directory / MARK).unlink(missing_ok=True)
        for path in (path for path in directory.iterdir() if path.name != OWNED):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.rmtree(directory)
    except OSError as error:
        raise InfrastructureError(
            f"cannot remove {directory}: {error.strerror}", hint="remove it by hand"
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill pip's whole session, as pip starts other processes. This is done before pip is reaped,
    while its pid cannot be reused.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(END_LIMIT_S)
