"""torchft: replicas agree on their membership before each step, and heal each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from trainchaos.harness.compare.environments.stack import (
    CommonJob,
    Drive,
    Requirements,
    Stack,
    Value,
    Way,
    module,
)

RESTARTS = 3
GROUP, TIMEOUT = "ProcessGroupGloo(timeout) s", "Manager(timeout) s"
HEARTBEAT, JOIN, TICK = (
    f"torchft_lighthouse --{name}"
    for name in ("heartbeat_timeout_ms", "join_timeout_ms", "quorum_tick_ms")
)


class Torchft(Stack):
    """One replica per rank, a lighthouse, and a small supervisor that restarts replicas.

    ``default`` is the command of its README (``torchft_lighthouse --min_replicas 1 --quorum_tick_ms
    100 --join_timeout_ms 10000``; the program's own default for the last is 60 s) and what its
    ``train_ddp.py`` sets.
    """

    title: ClassVar[str] = "torchft 0.2.0"
    requirements: ClassVar[Requirements | None] = Requirements(
        pins=("opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"),
        without_dependencies=("torchft==0.2.0",),
        probe="torchft",
    )
    way: ClassVar[Way] = "replica"
    plain: ClassVar[Mapping[str, Value]] = {
        GROUP: 5,
        TIMEOUT: 30,
        HEARTBEAT: 5000,
        JOIN: 10000,
        TICK: 100,
    }
    advised: ClassVar[Mapping[str, Value]] = {
        GROUP: 2,
        TIMEOUT: 10,
        HEARTBEAT: 500,
        JOIN: 1000,
        TICK: 20,
    }
    grid: ClassVar[Mapping[str, tuple[Value, ...]]] = {
        GROUP: (0.05, 0.1, 0.15),
        HEARTBEAT: (500,),
        JOIN: (10, 50),
        TICK: (20,),
    }
    tuned_because: ClassVar[str] = (
        "Its page Assumptions and Recommendations (docs/source/assumptions_and_recommendations.rst)"
        " wants min_replicas to be a majority, so that no replica goes on alone, and quorum_timeout"
        " high (kept at 60 s). A replica that is gone is missed after heartbeat_timeout_ms (default"
        " 5 s, while each beats every 0.1 s), stragglers are waited for until join_timeout_ms, and"
        " a hung one is given up by the timeout of the process group; all three are shortened to"
        " what one machine allows. Gradients go through Manager.allreduce, the documented call"
        " below the DistributedDataParallel wrapper."
    )

    def chosen(self) -> Mapping[str, object]:
        setting = self.settings
        return {
            "torchft_lighthouse --min_replicas": (
                1 if setting == "default" else "a majority of the replicas"
            ),
            **self.values,
            "Manager(min_replica_size)": (
                1 if setting == "default" else "a majority of the replicas"
            ),
            "Manager(init_sync)": False,
            "gradients": "DistributedDataParallel" if setting == "default" else "Manager.allreduce",
            "restarts of each replica": RESTARTS,
        }

    def drive(self, job: CommonJob, python: Path) -> Drive:
        setting = self.settings
        least = 1 if setting == "default" else job.ranks // 2 + 1
        lighthouse = (
            f"--min_replicas {least} --quorum_tick_ms {self.values[TICK]} --join_timeout_ms"
            f" {self.values[JOIN]} --heartbeat_timeout_ms {self.values[HEARTBEAT]}"
        )
        argv = module(
            python,
            "trainchaos.harness.peers.torchft_replicas",
            "--",
            "--gradients",
            "ddp" if setting == "default" else "flat",
            "--min-replicas",
            least,
            "--group-timeout",
            f"{self.values[GROUP]:g}",
            "--timeout",
            f"{self.values[TIMEOUT]:g}",
            restarts=RESTARTS,
            lighthouse=lighthouse,
        )
        return Drive(argv=argv, env=job.environment())

    def fidelity(self) -> tuple[str, ...]:
        return (
            (
                "replicas are restarted by a small supervisor, at once; its users have torchrun or"
                " a cluster for each"
            ),
            "replicas wait for each other before the first step, so that none begins alone",
            (
                "data follow the step that the Manager counts: torchft's own example restarts a"
                " replica's data from 0"
            ),
            (
                "gloo on CPU: after a collective that failed, its DistributedDataParallel asserts"
                " on a future that is not there (torchft/ddp.py), so that with the default settings"
                " the survivors of a kill end too"
            ),
            "the lighthouse is never hit, and it has no standby",
        )
