"""One job step: an agent on one node, and the srun that controls it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.slurm_commands import UNREACHABLE, last_line, srun

END_LIMIT_S = 5.0
SRUN_LIMIT_S = 0.2
TAIL = 4096
KEPT = frozenset(
    {
        "SLURM_CONF",
        "SLURM_CONF_SERVER",
        "SLURM_JWT",
        "SLURM_WORKING_CLUSTER",
        "SLURM_CLUSTERS",
        "SLURM_DEBUG",
    }
)
"""SLURM variables of the batch script that srun inherits. The others are defaults for the user's
own steps (tasks, memory, binding ...) that must not affect an agent.
"""


class SlurmStep:
    """Starts at once. ``name``: of the step; ``log``: output of srun and the agent."""

    def __init__(
        self,
        *,
        job: str,
        host: str,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.host = host
        self.name = name
        self.id = ""
        self._log = log
        words = srun(job=job, host=host, name=name, command=command)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as out:
                # A new session: chaos must handle Ctrl-C, by which srun would end the step.
                self._srun = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    env=step_environment(os.environ, environment),
                )
        except OSError as error:
            raise InfrastructureError(
                f"cannot start srun: {error.strerror}", hint="install Slurm's commands, or set PATH"
            ) from error

    @property
    def pid(self) -> int:
        """Pid of srun."""
        return self._srun.pid

    def ended(self) -> int | None:
        """srun's exit code, which is the agent's, or 128 plus the signal that ended it; None if it
        runs.
        """
        return self._srun.poll()

    def ends(self, limit_s: float) -> bool:
        """Wait for srun to end. True means that nothing of the step is left."""
        try:
            self._srun.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return False
        return self._srun.returncode >= 0

    def kill(self) -> None:
        """End srun if it waits for a step that cannot be ended, such as on a lost node."""
        if not self.ends(SRUN_LIMIT_S):
            self._srun.kill()
            self._srun.wait(timeout=END_LIMIT_S)

    def words(self) -> str:
        """How the step ended, for people."""
        code, said = self.ended(), last_line(self._tail())
        if self.unreachable():
            return f"Slurm has lost {self.host}: {said}"
        how = (
            f"by {signal.Signals(code - 128).name}"
            if code and self.killed()
            else f"with exit code {code}"
        )
        return f"its job step on {self.host} ended {how}" + (f": {said}" if said else "")

    def killed(self) -> bool:
        """Whether it ended by a signal."""
        code = self.ended()
        return code is not None and 128 < code < 160

    def unreachable(self) -> bool:
        """Whether it ended because the node could not be reached, not because of the agent."""
        tail = self._tail()
        return self.ended() is not None and any(word in tail for word in UNREACHABLE)

    def _tail(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
                return log.read(TAIL).decode(errors="replace")
        except OSError:
            return ""


def step_environment(own: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun, which passes it on to the agent."""
    kept = {
        key: value
        for key, value in own.items()
        if not key.startswith(("SLURM_", "SRUN_")) or key in KEPT
    }
    return {**kept, **wanted}
