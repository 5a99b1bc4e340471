"""Slurm's own commands, each with a time limit, and their answers.

The output formats used here are those that Slurm's manual pages guarantee to scripts
(``--noheader``, ``--format``, ``--oneliner``).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.errors import InfrastructureError

ASK_LIMIT_S = 10.0
"""Limit of one answer of the controller: longer than Slurm's own MessageTimeout, by default
10 s.
"""

TRY_LIMIT_S = 15.0
"""Limit of a step that does nothing."""

UNREACHABLE = (
    "Unable to contact",
    "Task launch for",
    "Node failure",
    "Communication connection failure",
    "on nodes not",
)
"""Output of srun when a node has failed, and not the command on it."""

SILENT = re.compile(r"contact slurm controller|connect failure|timed out|zero bytes", re.IGNORECASE)
NO_JOB = re.compile(r"invalid job id|job not found|no job", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a command ended."""

    code: int
    out: str = ""
    err: str = ""


Run = Callable[[Sequence[str], float], Ran]
"""Runs a command within a number of seconds. Raises InfrastructureError if it takes longer or does
not exist.
"""


class ControllerSilent(InfrastructureError):
    """slurmctld does not answer."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"the Slurm controller does not answer: {why}",
            hint=(
                "scontrol ping says whether slurmctld runs; ask whoever operates the cluster, then"
                " start again"
            ),
        )


@dataclass(frozen=True, kw_only=True)
class SlurmNodeState:
    """Slurm's state of a node. ``state``: its base state (IDLE, ALLOCATED, DOWN ...); ``flags``:
    such as DRAIN, NOT_RESPONDING; ``reason``: from an operator or Slurm; ``address``: of its
    daemon.
    """

    name: str
    state: str
    flags: frozenset[str]
    reason: str = ""
    address: str = ""

    @property
    def lost(self) -> bool:
        """Whether Slurm has given it up. A node that does not respond may only be slow; a draining
        node still works.
        """
        return self.state in ("DOWN", "ERROR", "FUTURE") or bool(
            self.flags & {"FAIL", "POWERED_DOWN", "REBOOT"}
        )

    def __str__(self) -> str:
        return "+".join([self.state, *sorted(self.flags)]) + (
            f" ({self.reason})" if self.reason else ""
        )


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """Slurm's state of a job. ``state``: RUNNING, PREEMPTED ...; ``reason``: for that state;
    ``nodelist``: its present nodes; a lost node has left it for ever.
    """

    state: str
    reason: str = ""
    nodelist: str = ""

    @property
    def over(self) -> bool:
        """Whether its nodes no longer belong to us, or are about to be taken away."""
        return self.state not in (
            "RUNNING",
            "CONFIGURING",
            "SUSPENDED",
            "RESIZING",
            "SIGNALING",
            "STAGE_OUT",
        )


@dataclass(frozen=True, kw_only=True)
class RunningStep:
    """One step of a job. ``id``: such as ``12.3``; ``nodes``: as a node list."""

    id: str
    nodes: str
    name: str


class Commands:
    """The commands. ``run``: runs one; ``limit_s``: for each."""

    def __init__(self, run: Run | None = None, *, limit_s: float = ASK_LIMIT_S) -> None:
        self._run = run or run_command
        self._limit_s = limit_s

    def hostnames(self, nodelist: str) -> tuple[str, ...]:
        """The nodes of a list such as ``n[1-3,7]``, in its order; needs no controller."""
        return tuple(self._ask(["scontrol", "show", "hostnames", nodelist]).split())

    def job(self, job: str) -> SlurmJob | None:
        """A job's state; None if Slurm no longer knows it."""
        try:
            rows = list(records(self._ask(["scontrol", "--oneliner", "show", "job", job])))
        except InfrastructureError as error:
            if NO_JOB.search(error.message):
                return None
            raise
        if not rows:
            return None
        row = rows[0]
        return SlurmJob(
            state=row.get("JobState", ""),
            reason=row.get("Reason", ""),
            nodelist=row.get("NodeList", ""),
        )

    def nodes(self, names: Sequence[str]) -> dict[str, SlurmNodeState]:
        out = self._ask(["scontrol", "--oneliner", "show", "node", ",".join(names)])
        return {row["NodeName"]: _node(row) for row in records(out) if "NodeName" in row}

    def known(self) -> tuple[str, ...]:
        """The names of all nodes of the cluster."""
        rows = records(self._ask(["scontrol", "--oneliner", "show", "node"]))
        return tuple(row["NodeName"] for row in rows if "NodeName" in row)

    def steps(self, job: str) -> list[RunningStep]:
        out = self._ask(["squeue", "--steps", "--noheader", "--format=%i|%N|%j", f"--jobs={job}"])
        rows = [line.strip().split("|", 2) for line in out.splitlines() if line.count("|") >= 2]
        return [RunningStep(id=step, nodes=nodes, name=name) for step, nodes, name in rows]

    def kill(self, step: str) -> str:
        """SIGKILL all processes of a step; returns "" or an error. Scancel's output is ignored,
        since it contains errors even after success.
        """
        try:
            self._run(["scancel", "--signal=KILL", step], self._limit_s)
        except InfrastructureError as error:
            return error.message
        return ""

    def unreachable(self, job: str, host: str, *, name: str) -> str:
        """Why nothing can run on a node of a job, found by trying; "" if it can. Raises
        ControllerSilent.
        """
        command = srun(job=job, host=host, name=name, command=["true"])
        try:
            ran = self._run(command, TRY_LIMIT_S)
        except ControllerSilent as error:
            self.nodes([host])  # raises if the controller is the one not answering
            return error.why
        telling = [
            line for line in ran.err.splitlines() if any(word in line for word in UNREACHABLE)
        ]
        return telling[0] if ran.code and telling else ""

    def drain(self, node: str, reason: str) -> None:
        """Make Slurm place no more jobs on a node. Raises InfrastructureError, for example without
        permission.
        """
        self._ask(["scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}"])

    def _ask(self, command: Sequence[str]) -> str:
        ran = self._run(command, self._limit_s)
        if ran.code == 0:
            return ran.out
        words = last_line(ran.err) or f"exit code {ran.code}"
        if SILENT.search(ran.err):
            raise ControllerSilent(words)
        raise InfrastructureError(f"{' '.join(command[:3])}: {words}")


def run_command(command: Sequence[str], limit_s: float) -> Ran:
    """Run a Slurm command."""
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ControllerSilent(f"{command[0]} did not end within {limit_s:g} s") from None
    except OSError as error:
        raise InfrastructureError(
            f"cannot run {command[0]}: {error.strerror}",
            hint="install Slurm's commands, or set PATH",
        ) from error
    return Ran(code=ran.returncode, out=ran.stdout, err=ran.stderr)


def srun(*, job: str, host: str, name: str, command: Sequence[str]) -> list[str]:
    """The command line: one task with all the job's resources of the node, beside other steps of
    the job. One step per node, and --no-kill, so that losing a node ends only its own step.
    """
    return [
        "srun",
        f"--jobid={job}",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        f"--job-name={name}",
        "--overlap",
        "--no-kill",
        "--mem=0",
        "--cpu-bind=none",
        "--export=ALL",
        "--input=none",
        "--unbuffered",
        "--wait=0",
        "--kill-on-bad-exit=0",
        *command,
    ]


def installed() -> bool:
    """Whether Slurm's commands are installed."""
    return all(shutil.which(name) for name in ("srun", "scontrol", "squeue", "scancel"))


def records(text: str) -> Iterator[Mapping[str, str]]:
    """Lines of ``--oneliner``: ``Key=value`` words. A value with blanks (a reason, an operating
    system) extends to the next word that starts like a key.
    """
    for line in text.splitlines():
        starts = [match for match in re.finditer(r"(?:^|\s)([A-Z][\w:/]*)=", line)]
        ends = [match.start() for match in starts[1:]] + [len(line)]
        if starts:
            yield {
                match[1]: line[match.end() : end].strip()
                for match, end in zip(starts, ends, strict=True)
            }


def last_line(text: str) -> str:
    """The last line of a command's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _node(row: Mapping[str, str]) -> SlurmNodeState:
    shown = row.get("State", "UNKNOWN")
    state, *flags = re.sub(r"[^A-Z_+]", "", shown).split("+")
    return SlurmNodeState(
        name=row["NodeName"],
        state=state,
        flags=frozenset(flags + ["NOT_RESPONDING"] * ("*" in shown)),
        reason=row.get("Reason", "").partition(" [")[0],
        address=row.get("NodeAddr", ""),
    )
