"""Slurm's state of the nodes and the job, read on a separate thread and only while it is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.slurm_commands import Commands, SlurmJob, SlurmNodeState

EVERY_S = 1.0
"""Time between two looks; the controller of a large cluster serves others too."""
TRIED_AFTER_S = 3.0
"""How long a node must be in doubt before it is tried: Slurm itself takes minutes to notice
a loss.
"""
END_LIMIT_S = 1.0


class AllocationWatch:
    """Watches one allocation. Queries are cheap: they answer from the last look and trigger
    another. ``name``: of the test steps on nodes whose agent is silent, which tell a lost node from
    a slow agent.
    """

    def __init__(
        self,
        slurm: Commands,
        job: str,
        hosts: Sequence[str],
        *,
        name: str,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slurm = slurm
        self._job = job
        self._hosts = hosts
        self._name = name
        self._clock_s = clock_s
        self._nodes: Mapping[str, SlurmNodeState] = {}
        self._of_job: SlurmJob | None = SlurmJob(state="RUNNING")
        self._looked_s = -EVERY_S
        # silent nodes: time of the first and the last query
        self._doubted: dict[str, tuple[float, float]] = {}
        self._dead: dict[str, str] = {}
        self._asked = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="slurm-watch", daemon=True)
        self._thread.start()

    def lost(self, host: str, *, silent: bool = False) -> str | None:
        """Why a node, or the whole job, is lost; None if neither is known to be lost. ``silent``:
        the node's agent is silent; after some seconds of that, the thread tries whether the node
        runs anything.
        """
        now_s = self._clock_s()
        if silent:
            since_s, last_s = self._doubted.get(host, (now_s, now_s))
            fresh = now_s - last_s > 2 * EVERY_S
            self._doubted[host] = (now_s if fresh else since_s, now_s)
        self.ask()
        job, node = self._of_job, self._nodes.get(host)
        if job is None or job.over:
            return f"the allocation is over: {self.job_words()}"
        if node is not None and node.lost:
            return f"Slurm says that {host} is {node}"
        return self._dead.get(host)

    def usable(self, host: str) -> bool:
        """Whether a step can start there, as far as is known."""
        node = self._nodes.get(host)
        return host not in self._dead and not (node is not None and node.lost)

    def ask(self) -> bool:
        """Make the thread look if the last look is too old; returns whether it will."""
        due = self._clock_s() - self._looked_s >= EVERY_S
        if due:
            self._asked.set()
        return due

    def over(self) -> bool:
        """Whether the allocation is known to be over."""
        return self._of_job is None or self._of_job.over

    def job_words(self) -> str:
        """The job and its state, for people."""
        job = self._of_job
        if job is None:
            return f"Slurm does not know job {self._job} any more"
        why = f" ({job.reason})" if job.reason not in ("", "None") else ""
        return f"job {self._job} is {job.state}{why}"

    def state(self, host: str) -> SlurmNodeState | None:
        """The last known state of a node."""
        return self._nodes.get(host)

    def look(self) -> None:
        """Look now, on the calling thread. Raises InfrastructureError."""
        self._looked_s = self._clock_s()
        self._of_job = self._slurm.job(self._job)
        self._nodes = self._slurm.nodes(self._hosts)

    def try_doubted(self) -> None:
        """Try nodes that have been silent for a while. Raises InfrastructureError if the controller
        does not answer.
        """
        now_s = self._clock_s()
        for host, (since_s, last_s) in list(self._doubted.items()):
            if now_s - last_s > 2 * EVERY_S:
                del self._doubted[host]  # no longer queried
            elif now_s - since_s >= TRIED_AFTER_S and host not in self._dead:
                why = self._slurm.unreachable(self._job, host, name=self._name)
                if why:
                    self._dead[host] = f"{host} runs nothing any more: {why}"

    def close(self) -> None:
        """End the thread; if it waits for a silent controller, it ends when its command does."""
        self._closed = True
        self._asked.set()
        self._thread.join(END_LIMIT_S)

    def _work(self) -> None:
        while True:
            self._asked.wait(timeout=60.0)
            if self._closed:
                return
            if not self._asked.is_set():
                continue
            try:
                self.look()
                self.try_doubted()
            except InfrastructureError:
                # The controller is away: keep the last state; a running job does not need the
                # controller.
                self._looked_s = self._clock_s()
            self._asked.clear()
