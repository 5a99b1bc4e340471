"""The allocation that this process is in, from its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, Field

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.slurm_commands import Commands
from trainchaos.recovery.health.taints import WHAT_TO_DO, Taint, listed

HOW = "chaos plan --sbatch SCENARIO | sbatch submits a job that runs it"


class AllocationOptions(BaseModel):
    """What a batch script requests besides nodes: parameters of launcher ``slurm``, which describes
    them.
    """

    partition: str = ""
    account: str = ""
    gpus_per_node: int = Field(default=0, ge=0, le=64)
    cpus_per_node: int = Field(default=0, ge=0, le=1024)
    reserve_nodes: int = Field(default=0, ge=0, le=1000)
    grace_s: int = Field(default=60, ge=1, le=65535)
    extra: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """``job``: its id; ``hosts``: its nodes, in the order of its node list: node k of the scenario
    is the k-th of them, whatever Slurm's task numbers; ``restarts``: how often it was requeued.
    """

    job: str
    hosts: tuple[str, ...]
    restarts: int = 0


def allocation(environment: Mapping[str, str], slurm: Commands) -> Allocation | None:
    """The allocation; None outside of one. Raises InfrastructureError if nothing can run in it."""
    job, nodelist = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    if not job:
        return None
    if not nodelist:
        raise InfrastructureError(
            f"SLURM_JOB_ID is {job}, but SLURM_JOB_NODELIST is not set",
            hint=(
                "run chaos in the shell of the batch script or of salloc, with the environment it"
                " has from Slurm"
            ),
        )
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        raise InfrastructureError(
            "srun has started chaos several times, once for each task",
            hint="start it once, without srun: it starts an agent on each node by itself",
        )
    restarts = int(environment.get("SLURM_RESTART_COUNT", 0))
    return Allocation(job=job, hosts=slurm.hostnames(nodelist), restarts=restarts)


def without_tainted(
    found: Allocation, taints: Sequence[Taint]
) -> tuple[Allocation, dict[str, tuple[Taint, ...]]]:
    """The allocation without its tainted hosts, and the taints of each of those."""
    bad = {host: tuple(each for each in taints if each.means([host])) for host in found.hosts}
    bad = {host: met for host, met in bad.items() if met}
    return replace(found, hosts=tuple(host for host in found.hosts if host not in bad)), bad


def too_few(found: Allocation, wanted: int, taints: Sequence[Taint] = ()) -> str | None:
    """Why an allocation, or what of it is not tainted, is too small, with a hint; None if it is
    large enough.
    """
    have, (left, bad) = len(found.hosts), without_tainted(found, taints)
    wants = f"the scenario wants {_nodes(wanted)} (spare ones included)"
    if have < wanted:
        return (
            f"{wants}, allocation {found.job} has {have} ({', '.join(found.hosts)}): ask for them"
            f" with --nodes={wanted}; {HOW}"
        )
    if len(left.hosts) >= wanted:
        return None
    met = [taint for each in bad.values() for taint in each]
    return (
        f"{wants}, and of allocation {found.job} {len(left.hosts)} of {have} are not tainted:"
        f" {listed(met)}; ask for others (chaos plan --sbatch excludes what is tainted), or"
        f" {WHAT_TO_DO}"
    )


def _nodes(number: int) -> str:
    return f"{number} node{'' if number == 1 else 's'}"
