"""A real Slurm on this machine for tests: one munged, one slurmctld and a slurmd for each node, all
private.

Configuration, sockets, keys and spool lie below one directory and every port is its own, so that
any number of these stand beside each other and beside a Slurm of the machine. Two partitions:
``main``, and ``urgent``, whose jobs preempt those of ``main``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from trainchaos.harness.host import processes
from trainchaos.recovery.process.processes import die_with, everybody

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue")
ADMIN_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
READY_LIMIT_S = 120.0
ASK_LIMIT_S = 120.0
END_LIMIT_S = 60.0
LOOK_S = 0.02
REQUIRED = "slurm" in os.environ.get("CHAOS_REQUIRE", "").split(",")

_CONF = """\
ClusterName=chaos
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CryptoType=crypto/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=1
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool.%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
MailProg=/bin/true
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait_s}
SlurmdTimeout=4
MessageTimeout=2
TcpTimeout=1
InactiveLimit=0
MpiDefault=none
GresTypes=gpu
"""


class SlurmCluster:
    """A running one. ``nodes``: its names; ``environment``: for commands that are to talk to it."""

    def __init__(self, base: Path, count: int, kill_wait_s: int) -> None:
        self.base = base
        self._kill_wait_s = kill_wait_s
        self.nodes = tuple(f"n{index + 1}" for index in range(count))
        self.conf = base / "slurm.conf"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        self.environment = {**inherited, "SLURM_CONF": str(self.conf), "PATH": ADMIN_PATH}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        """Start everything and wait until all nodes are idle."""
        self._write()
        key = self.base / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        files = [
            f"--{name}={self.base}/munge.{name}"
            for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._daemon("munged", "munged", "--foreground", "--force", f"--key-file={key}", *files)
        self.until(lambda: (self.base / "munge.socket").exists(), "munged to listen")
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.until(
            lambda: self.states() == {node: "IDLE" for node in self.nodes}, "all nodes to be idle"
        )

    def start_controller(self) -> None:
        """Start slurmctld, once more too."""
        self._daemon("slurmctld", "slurmctld", "-D", "-f", str(self.conf))

    def start_node(self, node: str) -> None:
        """Start a node's slurmd, once more too."""
        self._daemon(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def kill(self, daemon: str) -> None:
        """Kill ``slurmctld`` or the slurmd of a node, as a loss of power would."""
        process = self._daemons.pop(daemon)
        process.kill()
        process.wait(timeout=END_LIMIT_S)

    def stop_controller(self) -> None:
        """End slurmctld in an orderly way: killed, it may forget a job that was just submitted."""
        process = self._daemons.pop("slurmctld")
        process.terminate()
        process.wait(timeout=END_LIMIT_S)

    def lose(self, node: str) -> None:
        """Lose a whole node: its daemon and all that runs there, at one moment."""
        mine = [(pid, processes.start_time(pid)) for pid in self._of_node(node)]
        self.kill(node)
        for pid, started in mine:
            processes.end(pid, started, limit_s=END_LIMIT_S)

    def run(self, *command: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Output of a Slurm command."""
        ran = subprocess.run(
            command,
            env={**self.environment, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=ASK_LIMIT_S,
            cwd=self.base,
        )
        assert not check or ran.returncode == 0, f"{command}: {ran.stderr}"
        return ran.stdout

    def submit(self, script: str, *options: str, nodes: int) -> str:
        """Submit a batch script; returns the job's number. Its output: ``output``."""
        path = self.base / f"job-{secrets.token_hex(4)}.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        out = f"--output={self.base}/%j.out"
        return self.run(
            "sbatch", "--parsable", f"--nodes={nodes}", out, *options, str(path)
        ).strip()

    def output(self, job: str) -> str:
        """What a job has printed until now."""
        path = self.base / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """What slurmctld says of a job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job, check=False)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def states(self) -> dict[str, str]:
        """State of each node."""
        shown = self.run("scontrol", "--oneliner", "show", "node", check=False).splitlines()
        rows = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in shown]
        return {row["NodeName"]: row["State"] for row in rows if "NodeName" in row}

    def ended(self, job: str, limit_s: float = READY_LIMIT_S) -> str:
        """Wait for a job's end; returns its state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.until(lambda: self.job(job).get("JobState") in over, f"job {job} to end", limit_s)
        return self.job(job)["JobState"]

    def until(self, holds: Callable[[], bool], what: str, limit_s: float = READY_LIMIT_S) -> None:
        """Wait until something holds; names what did not, with the controller's last words."""
        deadline = time.monotonic() + limit_s
        pause = _pause()
        while not holds():
            log = self.base / "slurmctld.log"
            words = log.read_text()[-2000:] if log.exists() else ""
            assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}\n{words}"
            pause()

    def close(self) -> None:
        """End everything, and whatever jobs have left."""
        if "slurmctld" in self._daemons:
            self.run("scancel", "--quiet", "--user", "root", check=False)
        for process in self._daemons.values():
            process.terminate()
        for process in self._daemons.values():
            try:
                process.wait(timeout=END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=END_LIMIT_S)
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def members(self) -> list[int]:
        """Living processes that were started by this Slurm, by its own path in their
        environment.
        """
        entry = f"SLURM_CONF={self.conf}"
        own = processes.ancestors(os.getpid())
        found = [pid for pid, fields in everybody() if fields[0] not in "ZX" and pid not in own]
        return [pid for pid in found if processes.environment_has(pid, entry)]

    def _of_node(self, node: str) -> list[int]:
        """Daemons, job steps and tasks of a node."""
        entry = f"SLURMD_NODENAME={node}"
        tasks = [pid for pid in self.members() if processes.environment_has(pid, entry)]
        steps = {int(fields[1]) for pid, fields in everybody() if pid in tasks}
        return [*tasks, *(pid for pid in steps if pid in self.members())]

    def _daemon(self, name: str, *command: str) -> None:
        me = os.getpid()
        log = (self.base / f"{name}.out").open("ab")
        with log:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.base,
                start_new_session=True,
                preexec_fn=lambda: die_with(me),
            )

    def _write(self) -> None:
        host = socket.gethostname().split(".")[0]
        controller, *ports = _free_ports(1 + len(self.nodes))
        text = _CONF.format(
            host=host,
            port=controller,
            munge=self.base / "munge.socket",
            base=self.base,
            kill_wait_s=self._kill_wait_s,
        )
        for node, port in zip(self.nodes, ports, strict=True):
            text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            text += "CPUs=2 RealMemory=4000 Gres=gpu:2\n"
        names = ",".join(self.nodes)
        text += (
            f"PartitionName=main Nodes={names} Default=YES PriorityTier=1 GraceTime=5 State=UP\n"
        )
        text += f"PartitionName=urgent Nodes={names} PriorityTier=2 State=UP\n"
        self.conf.write_text(text)
        devices = self.base / "devices"
        devices.mkdir()
        for index in range(2):
            os.mknod(devices / f"nvidia{index}", 0o020666, os.makedev(1, 3 if index else 5))
        (self.base / "gres.conf").write_text(f"Name=gpu File={devices}/nvidia[0-1]\n")
        (self.base / "state").mkdir()


@contextmanager
def cluster(count: int = 4, *, kill_wait_s: int = 2) -> Iterator[SlurmCluster]:
    """One for as long as the context lasts. ``kill_wait_s``: from the SIGTERM of a job's end to its
    SIGKILL.
    """
    base = Path(tempfile.mkdtemp(prefix="chaos-slurm-", dir="/tmp"))
    base.chmod(0o755)
    found = SlurmCluster(base, count, kill_wait_s)
    try:
        found.begin()
        yield found
    finally:
        found.close()
        left = found.members()
        if not left:
            shutil.rmtree(base, ignore_errors=True)
    assert not left, f"processes of the test's Slurm are left: {left}"


def lacking() -> str | None:
    """Why there can be none here; None when there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=ADMIN_PATH) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)}): apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "only root can start daemons that run jobs"


def skip_or_fail(reason: str) -> None:
    """Skip with the reason; where CHAOS_REQUIRE names slurm, fail."""
    if REQUIRED:
        pytest.fail(f"CHAOS_REQUIRE names slurm: {reason}")
    pytest.skip(reason)


def _free_ports(count: int) -> list[int]:
    """Ports nobody listens on; bound together, so that all differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _pause() -> Callable[[], None]:
    """A short wait between two looks at something that cannot be waited for."""
    never = threading.Event()
    return lambda: never.wait(LOOK_S) and None
