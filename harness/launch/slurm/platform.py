"""The nodes of an allocation as the platform of a run: one agent per node, each in its own job
step.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.slurm_commands import Commands
from trainchaos.harness.launch.nodes.platform import FewActs, Platform, PlatformNeeds
from trainchaos.harness.launch.slurm.allocation import Allocation, too_few
from trainchaos.harness.launch.slurm.step import SlurmStep
from trainchaos.harness.launch.slurm.watch import AllocationWatch
from trainchaos.harness.undo.slurm import CancelSteps
from trainchaos.recovery.health.taints import Taint
from trainchaos.recovery.nodes.coordinator.loss import TakenAway

BYE_LIMIT_S = 2.0
PROBE_PORT = 9  # never sent to: it only makes the kernel choose a route


class SlurmPlatform(FewActs, Platform):
    """Supplies nodes, and ends one: a job can only end its own work there.

    A node of the scenario is a host of the allocation. The remaining hosts wait in reserve; one of
    them takes over the number of a node whose host is lost. Once the agents run, the controller is
    needed only to start another step. ``found``: without its ``tainted`` hosts.
    """

    who = "a Slurm job"

    def __init__(
        self,
        wanted: PlatformNeeds,
        found: Allocation,
        slurm: Commands,
        *,
        host: str,
        drain: bool,
        tainted: Mapping[str, Sequence[Taint]] = MappingProxyType({}),
    ) -> None:
        short = too_few(found, wanted.nodes)
        if short:
            raise InfrastructureError(short)
        self.machines = self
        self._found = found
        self._slurm = slurm
        self._wanted = wanted
        self._drain = drain
        self._tainted = tainted
        self._prefix = f"chaos-{secrets.token_hex(8)}-"
        self._recorded = False
        self._lock = threading.Lock()  # nodes start on separate threads
        self._hosts = dict(enumerate(found.hosts[: wanted.nodes]))
        self._free = list(found.hosts[wanted.nodes :])
        self._bad: set[str] = set()
        self._steps: dict[int, SlurmStep] = {}
        self._old: list[SlurmStep] = []
        self._watch = AllocationWatch(slurm, found.job, found.hosts, name=f"{self._prefix}try")
        try:
            self._watch.look()
            if self._watch.over():
                raise InfrastructureError(
                    f"the allocation is over: {self._watch.job_words()}", hint="ask for another one"
                )
            self._set_bad_aside()
        except InfrastructureError:
            self._watch.close()
            raise
        self.host = host or self._own_address()
        self._say()
        for bad, taints in tainted.items():
            said = self._drain_host(bad, f"tainted: {taints[0].reason}")
            if said:
                print(said, file=sys.stderr)

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a step on the node's host, or on another host if that one is lost."""
        if self._watch.over():
            raise InfrastructureError(
                f"the allocation is over: {self._watch.job_words()}",
                hint="ask for another one, and run again",
            )
        with self._lock:
            host = self._seat(node)
            if not self._recorded:
                self._wanted.will(CancelSteps.of(self._found.job, self._prefix))
                self._recorded = True
            lives = sum(step.name.startswith(f"{self._prefix}n{node}.") for step in self._old)
            name = f"{self._prefix}n{node}.{lives}"
            log = self._wanted.run.root / "logs" / f"node-{node}.srun.log"
            self._steps[node] = SlurmStep(
                job=self._found.job,
                host=host,
                name=name,
                command=command,
                environment=environment,
                log=log,
            )
        self._watch.ask()

    def replaceable(self, node: int) -> bool:
        """Whether there is a host for it: its own, or one in reserve."""
        if self._watch.over():
            return False
        return self._usable(self._hosts[node]) or any(map(self._usable, self._free))

    def gone(self, node: int) -> str | None:
        """Why the node is gone: Slurm's state of its host, or the end of its step."""
        step = self._steps.get(node)
        running = step is not None and step.ended() is None
        lost = self._watch.lost(self._hosts[node], silent=running)
        if step is None or running:
            return TakenAway(lost) if lost else None
        if step.unreachable():
            self._bad.add(step.host)
        words = lost or step.words()
        return TakenAway(words) if lost or step.unreachable() or step.killed() else words

    def drain(self, node: int, reason: str) -> str | None:
        """Only if the user allows it."""
        return self._drain_host(self._hosts[node], reason)

    def _drain_host(self, host: str, reason: str) -> str | None:
        if not self._drain:
            return None
        try:
            self._slurm.drain(host, f"chaos: {reason}")
        except InfrastructureError as error:
            return f"{host} could not be drained: {error.message}"
        return (
            f"{host} is drained: {reason} (scontrol update nodename={host} state=resume takes it"
            " back)"
        )

    def close(self) -> Sequence[str]:
        """Agents have been ordered to end: wait a little, then cancel the rest."""
        self._watch.close()
        steps = [*self._steps.values(), *self._old]
        deadline = time.monotonic() + BYE_LIMIT_S
        if all([step.ends(max(0.0, deadline - time.monotonic())) for step in steps]):
            return ()
        outcome = CancelSteps.of(self._found.job, self._prefix).undo()
        for step in steps:
            step.kill()
        return () if outcome.ok else (outcome.text,)

    def kill(self, node: int) -> Mapping[str, Any]:
        """End the step of a node with everything in it. Raises OSError."""
        step = self._steps.get(node)
        if step is None or step.ended() is not None:
            raise ProcessLookupError(f"node {node} is gone")
        found = self._step_id(step)
        problem = self._slurm.kill(found)
        if problem:
            raise OSError(problem)
        return {"step": found, "host": step.host, "signal": 9}

    def seen(self, node: int) -> Mapping[str, Any]:
        """Slurm's state of a node's host, and srun's of its step."""
        self._watch.ask()
        step, state = self._steps.get(node), self._watch.state(self._hosts[node])
        code = None if step is None else step.ended()
        return {
            "host": self._hosts[node],
            "state": "exited" if code is not None else "running",
            "exit_code": code,
            "slurm_state": str(state or ""),
            "step": "" if step is None else step.id,
            "machine": "" if step is None else step.name,
        }

    def _step_id(self, step: SlurmStep) -> str:
        if not step.id:
            try:
                found = self._slurm.steps(self._found.job)
            except InfrastructureError as error:
                raise OSError(error.message) from error
            step.id = next((each.id for each in found if each.name == step.name), "")
        if not step.id:
            raise OSError(f"Slurm does not know step {step.name} of job {self._found.job}")
        return step.id

    def _seat(self, node: int) -> str:
        """The host to start a node on. Raises InfrastructureError."""
        before = self._steps.get(node)
        if before is not None:
            self._old.append(before)
            # A lost node whose step still runs has a silent or cut-off host: prefer another one.
            if before.ended() is None or not self._usable(self._hosts[node]):
                self._move(node)
        host = self._hosts[node]
        if not self._usable(host):
            raise InfrastructureError(
                f"node {node} ({host}) is lost, and allocation {self._found.job} has no host left"
                " for it",
                hint="ask for more nodes than the scenario has: launcher.params.reserve_nodes",
            )
        return host

    def _usable(self, host: str) -> bool:
        return host not in self._bad and self._watch.usable(host)

    def _move(self, node: int) -> None:
        """Give a node a host from the reserve. Its old host goes to the end of the reserve, and is
        drained if that is allowed and Slurm itself reports no problem with it.
        """
        for host in [host for host in self._free if self._usable(host)][:1]:
            state = self._watch.state(self._hosts[node])
            if state is None or not state.lost:
                said = self.drain(node, "its agent fell silent during a run")
                if said:
                    print(said, file=sys.stderr)
            self._free.remove(host)
            self._free.append(self._hosts[node])
            self._hosts[node] = host

    def _set_bad_aside(self) -> None:
        """Start on usable hosts only. Raises InfrastructureError."""
        for node, host in self._hosts.items():
            if not self._usable(host):
                self._move(node)
        lost = [
            f"{host} is {self._watch.state(host)}"
            for host in self._hosts.values()
            if not self._usable(host)
        ]
        if lost:
            raise InfrastructureError(
                f"allocation {self._found.job} has lost nodes that the scenario wants:"
                f" {', '.join(lost)}",
                hint="ask for another allocation, or for more nodes than the scenario has",
            )

    def _own_address(self) -> str:
        """This machine's address on the route to the nodes; a loopback address only if there is no
        other. Raises InfrastructureError.
        """
        states = map(self._watch.state, self._found.hosts)
        found = [_way_to(state.address) for state in states if state is not None]
        others = [address for address in found if address and not address.startswith("127.")]
        for address in [*others, *filter(None, found)][:1]:
            return address
        raise InfrastructureError(
            "cannot find the address of this machine that the nodes reach",
            hint="set launcher.params.host to it",
        )

    def _say(self) -> None:
        """Print which nodes of the allocation the run uses."""
        job, spare = self._found.job, ", ".join(self._free)
        lines = [
            f"Slurm job {job}: nodes"
            f" {', '.join(f'{n} on {host}' for n, host in self._hosts.items())}"
        ]
        lines += [f"  not used unless a node is lost: {spare}"] if spare else []
        lines += [
            f"  not used, as it is tainted: {host} ({taints[0].reason})"
            for host, taints in self._tainted.items()
        ]
        if self._found.restarts:
            lines.append(
                f"  it was requeued (restart {self._found.restarts}): this run begins anew"
            )
        print("\n".join(lines), file=sys.stderr)


def _way_to(address: str) -> str:
    """The local address of the route to a host; "" if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, PROBE_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
