"""A training script of anybody's that takes part in recovery through ``recovery.join()``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.scenario.parallelism import MeshShape
from trainchaos.harness.launch.workload import BuildContext, DataInfo, Program, Trainable, Workload


class Script(Workload):
    """Runs the Python program at ``path`` in every rank, with ``args``; the loop, the model and the
    data are its own.

    What it says to ``recovery.join()`` about steps, global batch and seed must be what the scenario
    says.
    """

    cuts_batches: ClassVar[bool] = False  # the script's loop is its own

    def misfit(self, mesh: MeshShape) -> str | None:
        """None: the script says to ``job.attach`` how its model is cut up."""
        return None

    path: str = Field(description="the script, from the directory the run is started in")
    args: list[str] = Field(default_factory=list)

    def prepare(self, directory: Path) -> DataInfo:
        """Run the script as far as ``recovery.join()``, to learn how many samples it has."""
        from trainchaos.recovery.rank.joining import JoinError
        from trainchaos.recovery.rank.script import describe

        path = Path(self.path).resolve()
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ScenarioError(
                f"the script {self.path} cannot be read: {error.strerror}",
                hint="correct workload.params.path",
            ) from error
        try:
            facts = describe(path, self.args)
        except JoinError as error:
            raise ScenarioError(error.message, hint=error.hint) from error
        said = {"steps": facts.steps, "global_batch": facts.global_batch}
        return DataInfo(
            path=path,
            samples=facts.samples,
            digest=digest,
            about=f"script {self.path}",
            fixed={name: value for name, value in said.items() if value is not None},
        )

    def build(self, context: BuildContext) -> Trainable:
        """The script builds its own. Raises TypeError."""
        raise TypeError("a script builds its model itself")

    def program(self) -> Program:
        return Program(path=Path(self.path).resolve(), args=tuple(self.args))
