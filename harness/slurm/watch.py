"""What Slurm says of the nodes and the job, looked up on a thread of its own and only while somebody asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from chaos.errors import InfrastructureError
from harness.slurm.commands import Commands, Job, NodeState

EVERY_S = 1.0
"""Between two looks while somebody asks; the controller of a large cluster has others to answer."""
END_LIMIT_S = 1.0


class Watch:
    """Of one allocation. Asking costs nothing: it answers what is known, and has the thread look again."""

    def __init__(
        self, slurm: Commands, job: str, hosts: Sequence[str], *, every_s: float = EVERY_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._slurm = slurm
        self._job = job
        self._hosts = hosts
        self._every_s = every_s
        self._clock_s = clock_s
        self._nodes: Mapping[str, NodeState] = {}
        self._of_job: Job | None = Job(state="RUNNING")
        self._looked_s = -every_s
        self._asked = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="slurm-watch", daemon=True)
        self._thread.start()

    def lost(self, host: str) -> str | None:
        """Why Slurm has given a node up, or the whole job; None: not so far as is known."""
        self.ask()
        job, node = self._of_job, self._nodes.get(host)
        if job is None or job.over:
            return f"the allocation is over: {self.job_words()}"
        return f"Slurm says that {host} is {node}" if node is not None and node.lost else None

    def ask(self) -> None:
        """Have the thread look, if what is known is older than a second."""
        if self._clock_s() - self._looked_s >= self._every_s:
            self._asked.set()

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

    def state(self, host: str) -> NodeState | None:
        """The last that is known of a node."""
        return self._nodes.get(host)

    def look(self) -> None:
        """Look now, here. Raises InfrastructureError."""
        self._looked_s = self._clock_s()
        self._of_job = self._slurm.job(self._job)
        self._nodes = self._slurm.nodes(self._hosts)

    def close(self) -> None:
        """End the thread; one that waits for a silent controller ends when its command does."""
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
            except InfrastructureError:
                # The controller is away: what was known stays, and a running job does not need it.
                self._looked_s = self._clock_s()
            self._asked.clear()
