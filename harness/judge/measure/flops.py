"""Model FLOPs utilisation: how much of the devices' peak a job uses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainchaos.chaos.plugins import WORKLOADS, load
from trainchaos.chaos.scenario.model import Scenario
from trainchaos.harness.launch.workload import Workload

PEAK_TFLOPS: Mapping[str, float] = MappingProxyType(
    {
        "H200": 66.9,
        "H100 PCIe": 51.2,
        "H100 NVL": 60.0,
        "H100": 66.9,
        "GH200": 66.9,
        "L40S": 91.6,
        "L4": 30.3,
        "A100": 19.5,
        "A10G": 31.2,
        "A10": 31.2,
        "V100": 15.7,
        "T4": 8.1,
    }
)
PEAK_TFLOPS_DOC = """FP32 peaks without sparsity and without TF32, from the makers' data sheets, by
what a device's name contains, the longer name first: the built-in workloads compute in float32."""


def peak_of(device: str) -> float | None:
    """A device's peak in floating-point operations per second; None if it is not in the table."""
    words = device.replace("-", " ").split()
    for name, tflops in PEAK_TFLOPS.items():
        if all(part in words for part in name.split()):
            return tflops * 1e12
    return None


def work_of(scenario: Scenario, system: Mapping[str, Any]) -> tuple[float, float] | str:
    """Floating-point operations of one sample, and the peak of all devices in use; or a message why
    they are not known.
    """
    spec = scenario.workload
    kind = load(WORKLOADS, Workload).get(spec.kind)
    flops = kind(**spec.params).flops_per_sample() if kind else None
    if flops is None:
        return f"the workload {spec.kind} does not say how many operations a sample takes"
    if spec.device != "cuda":
        return "no peak is stated for processors"
    if scenario.launcher.kind not in ("local", "agents"):
        return "the devices of other machines are not in system.json"
    devices = [str(name) for name in system.get("cuda_devices") or ()][: spec.ranks]
    peaks = [peak_of(device) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    if not devices or len(known) < len(devices):
        return (
            "no peak is stated for"
            f" {', '.join(dict.fromkeys(devices)) or 'the devices of this run'}"
        )
    return flops, sum(known)


def mfu(flops_per_sample: float, global_batch: int, step_s: float, peak: float) -> float:
    """Model FLOPs utilisation: operations that the model's formula needs for a step's samples, over
    what all devices in use could do in the median step's time (Chowdhery et al., "PaLM", 2022,
    appendix B: recomputation not counted).
    """
    return flops_per_sample * global_batch / (step_s * peak)
