"""Facts about the Slurm job of a run, and the reason for a SIGTERM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """For ``system.json``: the job, its node list, how often it was requeued; empty outside of a
    job.
    """
    if not environment.get("SLURM_JOB_ID"):
        return {}
    said = {
        "job": environment["SLURM_JOB_ID"],
        "nodes": environment.get("SLURM_JOB_NODELIST", ""),
        "partition": environment.get("SLURM_JOB_PARTITION", ""),
    }
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if restarts != "0":
        said["requeued"] = f"restart {restarts}: this run began anew"
    return {"slurm": said}


def end_notice(environment: Mapping[str, str]) -> str:
    """The meaning of a SIGTERM in a Slurm job, for people; "" outside of one."""
    job = environment.get("SLURM_JOB_ID")
    return f"Slurm told job {job} to end: preempted, cancelled, or out of time" if job else ""
