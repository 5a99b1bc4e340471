"""A Docker engine for tests: the one that runs here, or else a private one that is started and
ended with them.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trainchaos.harness.host.container_engine import RUN_LABEL, connect, lacks_engine
from trainchaos.recovery.process.processes import die_with

REQUIRED = "docker" in os.environ.get("CHAOS_REQUIRE", "").split(",")
"""Whether a missing engine fails tests instead of skipping them: in continuous integration it does.
"""
START_LIMIT_S = 120.0
END_LIMIT_S = 120.0
LOOK_S = 0.05


class PrivateEngine:
    """A ``dockerd`` of our own below a directory; ends with this process at the latest."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.url = f"unix://{place}/docker.sock"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        # One that was killed leaves these, and the next does not start beside them.
        below = self.place / "exec" / "containerd"
        for stale in (self.place / "pid", below / "containerd.pid", *below.glob("*.sock*")):
            stale.unlink(missing_ok=True)
        command = [
            "dockerd",
            "--host",
            self.url,
            "--data-root",
            str(self.place / "data"),
            "--exec-root",
            str(self.place / "exec"),
            "--pidfile",
            str(self.place / "pid"),
            "--bridge",
            "none",
        ]
        log, me = (self.place / "log").open("ab"), os.getpid()
        with log:
            started = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: die_with(me),
            )
        deadline, pause = time.monotonic() + START_LIMIT_S, threading.Event()
        while lacking := self.lacks():
            if started.poll() is not None or time.monotonic() > deadline:
                said = (self.place / "log").read_text().strip().splitlines()[-3:]
                raise RuntimeError(f"dockerd does not start ({lacking}): {' / '.join(said)}")
            pause.wait(LOOK_S)
        return started

    def lacks(self) -> str | None:
        """As ``lacks_engine``, of this one."""
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = self.url
        try:
            return lacks_engine()
        finally:
            os.environ.pop("DOCKER_HOST")
            if before is not None:
                os.environ["DOCKER_HOST"] = before

    def kill(self) -> None:
        """As a crash does; its containers live on."""
        self.process.kill()
        self.process.wait(timeout=END_LIMIT_S)

    def restart(self) -> None:
        """After ``kill``."""
        self.process = self._start()

    def close(self) -> None:
        """End it, with its containers."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._unmount()

    def _unmount(self) -> None:
        """Undo what it leaves mounted once it was killed: its folder, mounted on itself."""
        below = f"{self.place}/"
        points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for point in sorted((each for each in points if each.startswith(below)), reverse=True):
            subprocess.run(["umount", "--lazy", point], timeout=END_LIMIT_S, check=False)


def cannot_start() -> str:
    """Why no engine can be started here; "" when one can."""
    if shutil.which("dockerd") is None:
        return "dockerd is not installed"
    return "" if os.geteuid() == 0 else "only root can start one"


def skip_or_fail(why: str) -> None:
    """Not without an engine."""
    if REQUIRED:
        pytest.fail(f"CHAOS_REQUIRE says docker: {why}")
    pytest.skip(why)


@contextmanager
def private_engine() -> Iterator[PrivateEngine]:
    """One for a test that mistreats it."""
    if why := cannot_start():
        skip_or_fail(f"needs a Docker engine of its own: {why}")
    with tempfile.TemporaryDirectory(prefix="chaos-docker-", ignore_cleanup_errors=True) as place:
        engine = PrivateEngine(Path(place))
        try:
            yield engine
        finally:
            engine.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """A client of the engine that runs here, or of one that is started when none runs."""
    lacking = lacks_engine()
    if lacking is None:
        client = connect()
        yield client
        client.close()
        return
    if why := cannot_start():
        skip_or_fail(f"{lacking}; {why}")
    with private_engine() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", started.url)
        client = connect()
        yield client
        client.close()


def labelled(client: Any, run: str = "") -> list[str]:
    """Names of all containers and networks of a run, or of any."""
    label = {"label": f"{RUN_LABEL}={run}" if run else RUN_LABEL}
    found = client.containers.list(all=True, filters=label, ignore_removed=True)
    return [str(each.name) for each in [*found, *client.networks.list(filters=label)]]


def image_of(client: Any, tag: str, files: Mapping[str, bytes]) -> str:
    """An image with the shell of this machine and these files, all of them programs; returns its
    name.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for place in _shell():
            tar.add(os.path.realpath(place), arcname=place.lstrip("/"))
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    client.api.import_image_from_data(stream.getvalue(), repository="trainchaos-test", tag=tag)
    return f"trainchaos-test:{tag}"


def _shell() -> list[str]:
    """/bin/sh with the libraries that it loads."""
    said = subprocess.run(
        ["ldd", "/bin/sh"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    return ["/bin/sh", *(word for word in said.split() if word.startswith("/"))]


def python(code: str, *words: object) -> list[str]:
    """A command for ``Platform.start``."""
    return [sys.executable, "-c", code, *map(str, words)]
