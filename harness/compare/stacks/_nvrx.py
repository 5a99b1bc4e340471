"""Shared by the stacks of the NVIDIA Resiliency Extension: environment, and options of the
in-process wrapper.
"""

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
    module,
)

GROUP = "init_process_group(timeout) s"


def needs(probe: str) -> Requirements:
    """Requirements of the stacks; 0.4.1 is the last version with a wheel for a C library older than
    2.39. ``probe``: as in ``Requirements``.
    """
    return Requirements(
        pins=(
            "psutil==7.2.2",
            "packaging==26.3",
            "pyyaml==6.0.3",
            "nvidia-ml-py==13.615.71",
            "defusedxml==0.7.1",
        ),
        without_dependencies=("nvidia-resiliency-ext==0.4.1",),
        python=">=3.11,<3.13",
        shared="nvrx",
        probe=probe,
    )


def _of_wrapper(**seconds: float) -> dict[str, Value]:
    return {f"Wrapper({name}) s": value for name, value in seconds.items()}


class Inprocess(Stack):
    """``inprocess.Wrapper`` around the training loop. ``spares``: reserve ranks beside those that
    train.
    """

    requirements: ClassVar[Requirements | None] = needs("nvidia_resiliency_ext.inprocess")
    spares: ClassVar[int] = 0
    plain: ClassVar[Mapping[str, Value]] = {GROUP: 10}
    advised: ClassVar[Mapping[str, Value]] = {GROUP: 3} | _of_wrapper(
        monitor_thread_interval=0.05,
        monitor_process_interval=0.05,
        progress_watchdog_interval=0.1,
        last_call_wait=0.1,
        soft_timeout=8,
        hard_timeout=10,
        termination_grace_time=0,
    )
    grid: ClassVar[Mapping[str, tuple[Value, ...]]] = {
        GROUP: (0.25, 0.5),
        "Wrapper(soft_timeout) s": (1,),
        "Wrapper(hard_timeout) s": (2, 5),
    }
    tuned_because: ClassVar[str] = (
        "Its usage guide (docs/source/inprocess/usage_guide.rst, Restart latency) adds up the"
        " latency of these waits: last_call_wait, and for a hang soft_timeout or hard_timeout plus"
        " monitor_process_interval plus termination_grace_time, which 'is safe to set to 0' without"
        " SIGTERM handlers; intervals should grow only with the number of ranks. Known issue 1"
        " there recommends a short timeout of the gloo group, since a collective of gloo cannot be"
        " aborted; the others must exceed it, or ranks that only wait are killed with the hung one."
    )

    def chosen(self) -> Mapping[str, object]:
        return dict(self.values)

    def drive(self, job: CommonJob, python: Path) -> Drive:
        options = ["--group-timeout", f"{self.values[GROUP]:g}"]
        options += ["--spares", str(self.spares)] if self.spares else []
        for name, value in self.values.items():
            if name != GROUP:
                wait = name.removeprefix("Wrapper(").removesuffix(") s")
                options += [f"--{wait.replace('_', '-')}", f"{value:g}"]
        peers = "trainchaos.harness.peers"
        script = module(python, f"{peers}.nvrx_inprocess", *options)
        ranks = job.ranks + self.spares
        argv = module(python, f"{peers}.supervise", "--", *script, ranks=ranks)
        return Drive(argv=argv, env=job.environment() | {"TORCH_CPP_LOG_LEVEL": "error"})

    def fidelity(self) -> tuple[str, ...]:
        return (
            (
                "ranks are started directly by a small supervisor that ends none because another"
                " one did"
            ),
            (
                "rank 0 hosts the wrapper's store, as its TCPStore does by default, and the"
                " group's, as its example does: it is the one rank that the others cannot do"
                " without"
            ),
            (
                "before the first checkpoint the initial state is restored; NVIDIA's example goes"
                " on with what it has"
            ),
        )
