"""The undo record for a run's Slurm job steps."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.slurm_commands import ASK_LIMIT_S, Commands, Ran, Run, run_command
from trainchaos.harness.undo.base import Undo, UndoOutcome, done, failed, nothing, outside

END_LIMIT_S = 15.0
LOOK_S = 0.1
AGAIN_S = 1.0


class CancelSteps(Undo):
    """Kill the job steps of a run: those of one job whose names start with a prefix drawn for this
    run.

    Written before the first step exists. ``job``: the job's number; ``names``: the prefix;
    ``conf``: Slurm's configuration, if it is not the machine's own. Agents also end by themselves,
    some time after they lose their coordinator.
    """

    outlives_boot: ClassVar[bool] = True
    ends_processes: ClassVar[bool] = True
    do: Literal["cancel-steps"] = "cancel-steps"
    job: str = Field(pattern=r"^\d+$")
    names: str = Field(pattern=r"^chaos-[0-9a-f]{16}-$")
    conf: str = ""

    @classmethod
    def of(cls, job: str, names: str) -> CancelSteps:
        """The record for steps of a job of this Slurm."""
        return cls(job=job, names=names, conf=os.environ.get("SLURM_CONF", ""))

    def intent(self) -> str:
        return f"cancel the run's steps of Slurm job {self.job}"

    def stray(self, run: Path) -> str:
        """As in ``Undo``: Slurm's configuration names programs to run, so it must not come with the
        run.
        """
        if not self.conf or self.conf == os.environ.get("SLURM_CONF"):
            return ""
        if not outside(Path(self.conf).resolve(), run):
            return f"the configuration of Slurm is in the run's own directory: {self.conf}"
        owner = os.stat(self.conf).st_uid
        return (
            ""
            if owner in (0, os.geteuid())
            else f"the configuration of Slurm is another user's: {self.conf}"
        )

    def _undo(self) -> UndoOutcome:
        slurm = Commands(self._run(), limit_s=ASK_LIMIT_S)
        killed: set[str] = set()
        deadline, due = time.monotonic() + END_LIMIT_S, 0.0
        try:
            while mine := self._mine(slurm):
                # repeat: a node may come back meanwhile
                if set(mine) - killed or time.monotonic() > due:
                    due = time.monotonic() + AGAIN_S
                    for step in mine:
                        slurm.kill(step)
                killed |= set(mine)
                if self._on_lost_nodes(slurm, mine):
                    return done(
                        f"step {', '.join(mine)} is on a node that Slurm has lost: Slurm ends what"
                        " is there"
                    )
                if time.monotonic() > deadline:
                    return failed(f"steps {', '.join(mine)} do not end: scancel {' '.join(mine)}")
                time.sleep(LOOK_S)
        except InfrastructureError as error:
            return failed(
                f"could not {self.intent()}: {error.message}; the agents end by themselves, later"
            )
        if not killed:
            return nothing(f"no step of the run is left in Slurm job {self.job}")
        return done(f"cancelled steps {', '.join(sorted(killed))} of Slurm")

    def _mine(self, slurm: Commands) -> dict[str, str]:
        """Ids of the remaining steps -> their nodes."""
        job = slurm.job(self.job)
        if job is None or job.over:
            return {}  # Slurm itself ends the steps of a job that is over
        return {
            step.id: step.nodes
            for step in slurm.steps(self.job)
            if step.name.startswith(self.names)
        }

    def _on_lost_nodes(self, slurm: Commands, mine: Mapping[str, str]) -> bool:
        job = slurm.job(self.job)
        left = slurm.hostnames(job.nodelist) if job is not None and job.nodelist else ()
        states = slurm.nodes(sorted(set(mine.values())))
        return all(
            state.lost or "NOT_RESPONDING" in state.flags or state.name not in left
            for state in states.values()
        )

    def _run(self) -> Run:
        """Run commands with the run's own configuration, whichever process heals."""

        def run(command: Sequence[str], limit_s: float) -> Ran:
            return run_command(["env", f"SLURM_CONF={self.conf}", *command], limit_s)

        return run if self.conf else run_command
