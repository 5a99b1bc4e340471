"""Runs a user's training script in a rank's process, as ``python train.py`` would.

``python -m trainchaos.recovery.rank.script CONTROL MARK CONFIG`` is a cold start (three
descriptors); with ``--describe FD SCRIPT [ARGS]`` it runs a script as far as ``recovery.join()``
and writes down what it said there.
"""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trainchaos.chaos.events.log import EventWriter
from trainchaos.recovery.checkpoint.memory.keeper import KEEPER, KeeperConfig, be_keeper
from trainchaos.recovery.process.entry import EXIT_ERROR, Birth, live
from trainchaos.recovery.process.local import rank_environment
from trainchaos.recovery.rank.joining import (
    JoinError,
    ScriptSettings,
    SupervisedPlace,
    SupervisorSettings,
    taking,
)
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.progress_counters import MarkPage

DESCRIBE_LIMIT_S = 120.0
SHOWN_LINES = 12


class ScriptConfig(Birth):
    """A rank process that runs a script."""

    path: Path
    args: list[str]
    seat: SupervisorSettings


class ScriptError(Exception):
    """The script ended without success."""


def run_script(path: Path, args: Sequence[str], place: SupervisedPlace) -> None:
    """Run the script to its end in this process.

    Raises what the script raises, ScriptError when it asks for an exit status, JoinError when it
    does not take part in the job to its end.
    """
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.resolve().parent))
    with taking(place):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise ScriptError(f"the script ended with sys.exit({error.code!r})") from error
    if place.job is None:
        raise JoinError("the script ended without recovery.join()", hint="see docs/recovery.md")
    if not place.job.over:
        raise JoinError(
            "the script ended before the job did",
            hint="stay in `while job.running():` until it is false",
        )
    atexit._run_exitfuncs()


def describe(
    path: Path, args: Sequence[str], *, limit_s: float = DESCRIBE_LIMIT_S
) -> ScriptSettings:
    """What a script passes to ``recovery.join``. It runs that far in a process of its own. Raises
    JoinError with the script's last output when it does not get there within ``limit_s`` seconds.
    """
    reader, writer = os.pipe()
    try:
        ran = subprocess.run(
            [
                sys.executable,
                "-m",
                "trainchaos.recovery.rank.script",
                "--describe",
                str(writer),
                str(path),
                *args,
            ],
            pass_fds=[writer],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=rank_environment(),
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        os.close(reader)
        raise JoinError(f"{path} did not come to recovery.join() within {limit_s:.0f} s") from None
    finally:
        os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    if not text:
        last = ran.stderr.decode(errors="replace").strip().splitlines()[-SHOWN_LINES:]
        raise JoinError(
            f"{path} did not come to recovery.join():"
            f" {last[-1] if last else f'exit code {ran.returncode}'}",
            hint="\n  ".join(last),
        )
    return ScriptSettings.model_validate_json(text)


def start(config: bytes, control_fd: int, mark_fd: int) -> NoReturn:
    """Turn a fork into the process that ``config``, a ScriptConfig or KeeperConfig as JSON,
    describes.
    """
    if config.startswith(KEEPER):
        be_keeper(
            KeeperConfig.model_validate_json(config), Channel(socket.socket(fileno=control_fd))
        )
    told = ScriptConfig.model_validate_json(config)

    def train(channel: Channel, page: MarkPage, writer: EventWriter) -> None:
        run_script(
            told.path,
            told.args,
            SupervisedPlace(settings=told.seat, channel=channel, page=page, writer=writer),
        )

    live(told, control_fd, mark_fd, train)


def _describe(fd: int, path: Path, args: Sequence[str]) -> None:
    def write(facts: ScriptSettings) -> NoReturn:
        os.write(fd, facts.model_dump_json().encode())
        os._exit(0)

    settings = SupervisorSettings(supervisor="nobody", process="none", world=1)
    try:
        run_script(path, args, SupervisedPlace(settings=settings, describe=write))
    except JoinError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_ERROR)


def main() -> None:
    """See the module."""
    if sys.argv[1] == "--describe":
        _describe(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
        return
    control_fd, mark_fd, config_fd = (int(value) for value in sys.argv[1:4])
    with os.fdopen(config_fd, "rb") as stream:
        config = stream.read()
    start(config, control_fd, mark_fd)


if __name__ == "__main__":
    main()
