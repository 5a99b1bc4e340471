"""Ranks on nodes whose agents somebody else starts: pods of Kubernetes, ``chaos agent`` by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import Launcher, Session
from trainchaos.harness.launch.nodes.platform import PlatformNeeds
from trainchaos.harness.launch.nodes.remote import RemotePlatform

HOST, TOKEN_FILE = "CHAOS_HOST", "CHAOS_TOKEN_FILE"
"""Environment variables that take the place of parameters."""


class Remote(Launcher):
    """An agent on each node that connects by itself: ``chaos agent --coordinator HOST:PORT --node N
    --token-file FILE --scratch DIR``. The run's directory is at the same path on all nodes.

    ``host``: numeric address of this machine that the nodes reach, "": ``$CHAOS_HOST``; ``port``:
    where agents connect; ``token_file``: file with the secret that agents show, "":
    ``$CHAOS_TOKEN_FILE``; ``wait_s``: how long to wait for all agents. The rest is for ``chaos plan
    --k8s``: ``image``, with this program and the workload's software; ``claim``: name of the volume
    claim for the run's directory, which all pods share; ``cpus_per_node``, ``gpus_per_node`` (0:
    one for each rank).
    """

    offers: ClassVar[frozenset[Need]] = frozenset({Need.STORE_PROCESS, Need.COORDINATOR_PROCESS})

    host: str = ""
    port: int = Field(default=29431, ge=1, le=65535)
    token_file: str = ""
    wait_s: float = Field(default=600.0, gt=0, le=86400)
    image: str = "trainchaos"
    claim: str = "chaos-runs"
    cpus_per_node: int = Field(default=0, ge=0, le=1024)
    gpus_per_node: int = Field(default=0, ge=0, le=64)

    @contextmanager
    def session(self, cells: Sequence[Cell], run: RunDirectory) -> Iterator[Session]:
        """Wait for the agents; they serve the whole run. Raises ScenarioError for a token that
        cannot be used.
        """
        from trainchaos.harness.launch.nodes.cluster import nodes_session
        from trainchaos.recovery.nodes.serve import read_token

        token = read_token(Path(self._told(self.token_file, TOKEN_FILE, "token_file")))
        with nodes_session(
            cells, run, self._platform, token=token, port=self.port, ready_s=self.wait_s
        ) as session:
            yield session

    def missing(self, cell: Cell) -> str | None:
        """The address and the secret that agents need."""
        from trainchaos.recovery.nodes.serve import read_token

        try:
            self._told(self.host, HOST, "host")
            read_token(Path(self._told(self.token_file, TOKEN_FILE, "token_file")))
        except ScenarioError as error:
            return str(error)
        return None

    def _platform(self, wanted: PlatformNeeds) -> RemotePlatform:
        return RemotePlatform(wanted, host=self._told(self.host, HOST, "host"))

    def _told(self, given: str, variable: str, name: str) -> str:
        found = given or os.environ.get(variable, "")
        if not found:
            raise ScenarioError(
                f"launcher remote: neither {name} nor ${variable} is given",
                hint=f"launcher: {{kind: remote, params: {{{name}: ...}}}}",
            )
        return found
