"""How often nodes fail, and of what: published figures, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainchaos.harness.projection.result import GPUS_PER_NODE

DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Preset:
    """``rate``: failures that interrupt a job, per 1,000 nodes of 8 GPUs and day; ``source``: where
    it is from; ``counts``: of incidents by cause, as printed, empty if unknown; ``software``: those
    after which the nodes are as good as before; ``note``: what to know of it.
    """

    rate: float
    source: str
    counts: Mapping[str, int] = field(default_factory=dict)
    software: tuple[str, ...] = ()
    note: str = ""

    @property
    def processes(self) -> float:
        """Share of its failures that end processes only; our reading of the causes' names."""
        total = sum(self.counts.values())
        return sum(self.counts[name] for name in self.software) / total if total else 0.0


def rate_of(preset: Preset, gpus_per_node: int) -> float:
    """Its rate for nodes of so many GPUs. By far most failures are of a GPU or of what each has of
    its own: a node of twice as many fails twice as often.
    """
    return preset.rate * gpus_per_node / GPUS_PER_NODE


def mtbf_s(rate: float, nodes: float) -> float:
    """Mean time between failures of a job of so many nodes, seconds: 1 / (nodes x rate). ``rate``:
    as of a ``Preset``.
    """
    return DAY_S * 1000.0 / (rate * nodes)


LLAMA3: Mapping[str, int] = {
    "faulty GPU": 148,
    "GPU memory (HBM3)": 72,
    "software bug": 54,
    "switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM": 19,
    "GPU system processor": 17,
    "network card": 7,
    "NCCL watchdog": 7,
    "silent data corruption": 6,
    "GPU thermal interface and sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}
BYTEROBUST: Mapping[str, int] = {
    "CUDA error": 19_968,
    "manual restart": 9_582,
    "CPU overload": 6_095,
    "CPU out of memory": 5_567,
    "hang": 5_506,
    "disk space": 2_755,
    "InfiniBand": 1_599,
    "file system mount": 1_176,
    "HDFS": 1_104,
    "container": 781,
    "MFU decline": 442,
    "kernel panic": 203,
    "GPU memory error": 188,
    "NaN": 148,
    "external service": 128,
    "GPU unavailable": 76,
    "disk fault": 47,
}
_LLAMA3_SOURCE = (
    "Grattafiori et al., The Llama 3 Herd of Models, 2024, table 5: 419 unexpected interruptions in"
    " 54 days on 16,384 H100"
)
_KOKOLIS = "Kokolis et al., Revisiting Reliability in Large-Scale ML Research Clusters, 2025"
_LLAMA3_RATE = 419 / 54 / (16_384 / GPUS_PER_NODE) * 1000
_RSC = (
    "hardware alone: jobs of 1,024 GPUs were measured to fail 3.65 times as often as this law says"
)
PRESETS: Mapping[str, Preset] = {
    "low": Preset(rate=2.34, source=f"{_KOKOLIS}: RSC-2"),
    "mid": Preset(rate=_LLAMA3_RATE, source=_LLAMA3_SOURCE),
    "high": Preset(rate=6.50, source=f"{_KOKOLIS}: RSC-1", note=_RSC),
    "llama3": Preset(
        rate=_LLAMA3_RATE,
        source=_LLAMA3_SOURCE,
        counts=LLAMA3,
        software=("software bug", "NCCL watchdog", "dependency"),
    ),
    "byterobust": Preset(
        rate=_LLAMA3_RATE,
        source="ByteRobust, 2025: 55,365 incidents in three months",
        counts=BYTEROBUST,
        software=("manual restart", "HDFS", "external service"),
        note="a mix of causes without a number of nodes: the rate is that of llama3",
    ),
}
