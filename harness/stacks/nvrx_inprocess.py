"""NVIDIA Resiliency Extension, in-process restart: the training function is called again in the ranks that are left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from harness.stack import CommonJob, Drive, Requirements, Stack
from harness.stacks._nvrx import needs

GROUP_TIMEOUT_S = {"default": 10.0, "tuned": 3.0}
TUNED_S: Mapping[str, float] = {
    "monitor_thread_interval": 0.05, "monitor_process_interval": 0.05, "progress_watchdog_interval": 0.1,
    "last_call_wait": 0.1, "soft_timeout": 8.0, "hard_timeout": 10.0, "termination_grace_time": 0.0,
}  # fmt: skip


class NvrxInprocess(Stack):
    """``inprocess.Wrapper`` around the training loop; ranks started directly, since torchrun would end them all."""

    title: ClassVar[str] = "NVIDIA Resiliency Extension 0.4.1, in-process"
    requirements: ClassVar[Requirements | None] = needs("nvidia_resiliency_ext.inprocess")
    tuned_because: ClassVar[str] = (
        "Its usage guide (docs/source/inprocess/usage_guide.rst, Restart latency) adds up the latency of these waits: "
        "last_call_wait, and for a hang soft_timeout or hard_timeout plus monitor_process_interval plus "
        "termination_grace_time, which 'is safe to set to 0' without SIGTERM handlers; intervals should grow only with "
        "the number of ranks. Known issue 1 there recommends a short timeout of the gloo group, since a collective of "
        "gloo cannot be aborted; the others must exceed it, or ranks that only wait are killed with the hung one."
    )

    def chosen(self) -> Mapping[str, object]:
        """See Stack."""
        chosen: dict[str, object] = {"init_process_group(timeout)": f"{GROUP_TIMEOUT_S[self.settings]:g} s"}
        if self.settings == "tuned":
            chosen |= {f"Wrapper({name})": f"{value:g} s" for name, value in TUNED_S.items()}
        return chosen

    def drive(self, job: CommonJob, python: Path) -> Drive:
        """See Stack."""
        options = ["--group-timeout", f"{GROUP_TIMEOUT_S[self.settings]:g}"]
        if self.settings == "tuned":
            for name, value in TUNED_S.items():
                options += [f"--{name.replace('_', '-')}", f"{value:g}"]
        argv = (
            str(python), "-m", "harness.peers.supervise", "--ranks", str(job.ranks), "--",
            str(python), "-m", "harness.peers.nvrx_inprocess", *options,
        )  # fmt: skip
        return Drive(argv=argv, env=job.environment() | {"TORCH_CPP_LOG_LEVEL": "error"})

    def fidelity(self) -> tuple[str, ...]:
        """See Stack."""
        return (
            "ranks are started directly by a small supervisor that ends none because another one did",
            "a rank that is lost is not replaced: no reserve ranks, no launcher around it",
            "rank 0 hosts the wrapper's store, as its TCPStore does by default, and the group's, as its example does: "
            "it is the one rank that the others cannot do without",
            "before the first checkpoint the initial state is restored; NVIDIA's example goes on with what it has",
        )
