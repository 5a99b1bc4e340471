"""Starts and watches the processes of one machine: in the supervisor's own process, or in a node's
agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.process.forkserver import MAX_REQUEST, ForkServer, start_cold
from trainchaos.recovery.process.local import Children, rank_environment


@dataclass(frozen=True, kw_only=True)
class LaunchRecipe:
    """How processes of a node are started. ``entry``: ``module:function`` of warm ones
    (``recovery.process.forkserver.Entry``); ``cold``: the module that a cold one runs; ``modules``:
    imported before anything is forked; ``environment``: of all of them.
    """

    entry: str
    cold: str
    modules: Sequence[str]
    environment: Mapping[str, str]

    def server(self) -> ForkServer:
        """Start the fork server, which begins to import. The caller must be a child subreaper.
        Raises InfrastructureError.
        """
        return ForkServer(self.entry, self.modules, self.environment)


def script_recipe() -> LaunchRecipe:
    """The recipe of ranks that run a user's script (``recovery.rank.script``)."""
    modules = (
        "numpy.random",
        "torch",
        "torch._dynamo",
        "torch.utils.data",
        "torch.distributed.checkpoint",
        "trainchaos.recovery.rank.job",
        "trainchaos.recovery.state.warmth",
    )
    return LaunchRecipe(
        entry="trainchaos.recovery.rank.script:start",
        cold="trainchaos.recovery.rank.script",
        modules=modules,
        environment=rank_environment(),
    )


class Node(Children):
    """The processes of one arm on one machine; ``server`` is made from ``recipe`` and outlives it;
    ``named``: as for ``Children``.
    """

    def __init__(self, server: ForkServer, recipe: LaunchRecipe, *, named: bool = False) -> None:
        super().__init__(named=named)
        self._server = server
        self._recipe = recipe

    def start(
        self,
        name: str,
        config: bytes,
        *,
        mode: str,
        log: Path | None = None,
        waiting: Callable[[], None] | None = None,
    ) -> int:
        """Start a process, warm or cold, and return its pid. ``config``: for its entry; ``log``:
        its event log; ``waiting``: called repeatedly until the process exists.

        Raises InfrastructureError.
        """
        if len(config) > MAX_REQUEST:
            raise InfrastructureError(
                f"the configuration of {name} has {len(config)} bytes, over {MAX_REQUEST}",
                hint="pass large parameters by a file",
            )

        def begin(fds: list[int]) -> int:
            if mode == "warm":
                return self._server.fork(config, fds, waiting)
            return start_cold(self._recipe.cold, config, fds, self._recipe.environment)

        return self.spawn(name, begin, log=log)
