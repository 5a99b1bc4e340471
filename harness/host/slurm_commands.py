"""Slurm's own commands, each with a bound, and what they answer.

Slurm's output formats asked for here are those that its manual pages promise to scripts
(``--noheader``, ``--format``, ``--oneliner``).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chaos.errors import InfrastructureError

ASK_LIMIT_S = 10.0
"""For one answer of the controller: longer than Slurm's own MessageTimeout where a site has left it
at 10 s.
"""

TRY_LIMIT_S = 15.0
"""For a step that does nothing."""

UNREACHABLE = (
    "Unable to contact",
    "Task launch for",
    "Node failure",
    "Communication connection failure",
    "on nodes not",
)
"""What srun says when a node, rather than what ran there, has failed."""

SILENT = re.compile(r"contact slurm controller|connect failure|timed out|zero bytes", re.IGNORECASE)
NO_JOB = re.compile(r"invalid job id|job not found|no job", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a command ended."""

    code: int
    out: str = ""
    err: str = ""


Run = Callable[[Sequence[str], float], Ran]
"""Runs a command within so many seconds. Raises InfrastructureError when it does not end by then,
or is not there.
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
    """What Slurm says of a node. ``state``: its base state (IDLE, ALLOCATED, DOWN ...); ``flags``:
    such as DRAIN, NOT_RESPONDING; ``reason``: why, in an operator's words or Slurm's; ``address``:
    of its daemon.
    """

    name: str
    state: str
    flags: frozenset[str]
    reason: str = ""
    address: str = ""

    @property
    def lost(self) -> bool:
        """Slurm has given it up. A node that merely does not respond may be slow; one that drains
        goes on working.
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
    """What Slurm says of a job. ``state``: RUNNING, PREEMPTED ...; ``reason``: why; ``nodelist``:
    that it has now: a node that was lost has left it, and does not come back to it.
    """

    state: str
    reason: str = ""
    nodelist: str = ""

    @property
    def over(self) -> bool:
        """Its nodes are ours no more, or will not be in a moment."""
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
    """The commands. ``run``: how they are run; ``limit_s``: for each."""

    def __init__(self, run: Run | None = None, *, limit_s: float = ASK_LIMIT_S) -> None:
        self._run = run or run_command
        self._limit_s = limit_s

    def hostnames(self, nodelist: str) -> tuple[str, ...]:
        """The nodes of a list such as ``n[1-3,7]``, in its order; asks nobody."""
        return tuple(self._ask(["scontrol", "show", "hostnames", nodelist]).split())

    def job(self, job: str) -> SlurmJob | None:
        """A job's state; None: Slurm does not know it any more."""
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
        """States of nodes, by name."""
        out = self._ask(["scontrol", "--oneliner", "show", "node", ",".join(names)])
        return {row["NodeName"]: _node(row) for row in records(out) if "NodeName" in row}

    def steps(self, job: str) -> list[RunningStep]:
        """A job's running steps."""
        out = self._ask(["squeue", "--steps", "--noheader", "--format=%i|%N|%j", f"--jobs={job}"])
        rows = [line.strip().split("|", 2) for line in out.splitlines() if line.count("|") >= 2]
        return [RunningStep(id=step, nodes=nodes, name=name) for step, nodes, name in rows]

    def kill(self, step: str) -> str:
        """SIGKILL to all of a step; "" or why not. What scancel prints beside it says nothing: it
        complains after success too.
        """
        try:
            self._run(["scancel", "--signal=KILL", step], self._limit_s)
        except InfrastructureError as error:
            return error.message
        return ""

    def unreachable(self, job: str, host: str, *, name: str) -> str:
        """Why nothing can be run on a node of a job, found by trying; "": it can. Raises
        ControllerSilent.
        """
        command = srun(job=job, host=host, name=name, command=["true"])
        try:
            ran = self._run(command, TRY_LIMIT_S)
        except ControllerSilent as error:
            self.nodes([host])  # raises where it is the controller that does not answer
            return error.why
        telling = [
            line for line in ran.err.splitlines() if any(word in line for word in UNREACHABLE)
        ]
        return telling[0] if ran.code and telling else ""

    def drain(self, node: str, reason: str) -> None:
        """Have Slurm place no job on a node any more. Raises InfrastructureError, as for a user who
        may not.
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
    """Run a command of Slurm's."""
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
    """The command line: one task with all of the node that the job has, beside whatever else the
    job runs there. One step a node, and --no-kill: the loss of a node then ends its own step and no
    other.
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
    """Whether Slurm's commands are there."""
    return all(shutil.which(name) for name in ("srun", "scontrol", "squeue", "scancel"))


def records(text: str) -> Iterator[Mapping[str, str]]:
    """Lines of ``--oneliner``: ``Key=value`` words. A value with blanks (a reason, an operating
    system) goes on to the next word that begins like a key.
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
    """What a command said last."""
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
