"""torchft: replicas that agree on who is there before each step, and heal each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from harness.stack import CommonJob, Drive, Requirements, Stack

RESTARTS = 3
GROUP_TIMEOUT_S = {"default": 5.0, "tuned": 2.0}
TIMEOUT_S = {"default": 30.0, "tuned": 10.0}
HEARTBEAT_MS = {"default": 5000, "tuned": 500}
JOIN_MS = {"default": 10000, "tuned": 1000}
TICK_MS = {"default": 100, "tuned": 20}


class Torchft(Stack):
    """One replica a rank, a lighthouse beside them, and whoever restarts replicas.

    ``default`` is what its README starts (``torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms
    10000``; the program's own default for the last is 60 s) and what its ``train_ddp.py`` sets.
    """

    title: ClassVar[str] = "torchft 0.2.0"
    requirements: ClassVar[Requirements | None] = Requirements(
        pins=("opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"),
        without_dependencies=("torchft==0.2.0",),
        probe="torchft",
    )  # fmt: skip
    tuned_because: ClassVar[str] = (
        "Its page Assumptions and Recommendations (docs/source/assumptions_and_recommendations.rst) wants min_replicas "
        "to be a majority, so that no replica goes on alone, and quorum_timeout high (kept at 60 s). A replica that is "
        "gone is missed after heartbeat_timeout_ms (default 5 s, while each beats every 0.1 s), stragglers are waited "
        "for until join_timeout_ms, and a hung one is given up by the timeout of the process group; all three are "
        "shortened to what one machine allows. Gradients go through Manager.allreduce, the documented call below the "
        "DistributedDataParallel wrapper."
    )

    def chosen(self) -> Mapping[str, object]:
        """See Stack."""
        setting = self.settings
        return {
            "torchft_lighthouse --min_replicas": 1 if setting == "default" else "a majority of the replicas",
            "torchft_lighthouse --quorum_tick_ms": TICK_MS[setting],
            "torchft_lighthouse --join_timeout_ms": JOIN_MS[setting],
            "torchft_lighthouse --heartbeat_timeout_ms": HEARTBEAT_MS[setting],
            "ProcessGroupGloo(timeout)": f"{GROUP_TIMEOUT_S[setting]:g} s",
            "Manager(timeout)": f"{TIMEOUT_S[setting]:g} s",
            "Manager(min_replica_size)": 1 if setting == "default" else "a majority of the replicas",
            "Manager(init_sync)": False,
            "gradients": "DistributedDataParallel" if setting == "default" else "Manager.allreduce",
            "restarts of each replica": RESTARTS,
        }

    def drive(self, job: CommonJob, python: Path) -> Drive:
        """See Stack."""
        setting = self.settings
        least = 1 if setting == "default" else job.ranks // 2 + 1
        lighthouse = (
            f"--min_replicas {least} --quorum_tick_ms {TICK_MS[setting]} --join_timeout_ms {JOIN_MS[setting]} "
            f"--heartbeat_timeout_ms {HEARTBEAT_MS[setting]}"
        )
        argv = (
            str(python), "-m", "harness.peers.torchft_replicas",
            "--restarts", str(RESTARTS), "--lighthouse", lighthouse, "--",
            "--gradients", "ddp" if setting == "default" else "flat", "--min-replicas", str(least),
            "--group-timeout", f"{GROUP_TIMEOUT_S[setting]:g}", "--timeout", f"{TIMEOUT_S[setting]:g}",
        )  # fmt: skip
        return Drive(argv=argv, env=job.environment())

    def fidelity(self) -> tuple[str, ...]:
        """See Stack."""
        return (
            "replicas are restarted by a small supervisor, at once; its users have torchrun or a cluster for each",
            "replicas wait for each other before the first step, so that none begins alone",
            "data follow the step that the Manager counts: torchft's own example restarts a replica's data from 0",
            "gloo on CPU: after a collective that failed, its DistributedDataParallel asserts on a future that is not "
            "there (torchft/ddp.py), so that with the default settings the survivors of a kill end too",
            "the lighthouse is never hit, and it has no standby",
        )
