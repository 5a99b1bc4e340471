"""The environment that both restarts of the NVIDIA Resiliency Extension share."""

from __future__ import annotations

from harness.stack import Requirements


def needs(probe: str) -> Requirements:
    """Its pins; 0.4.1 is the last version with a wheel for a C library older than 2.39. ``probe``: as of
    ``Requirements``."""
    return Requirements(
        pins=(
            "psutil==7.2.2", "packaging==26.3", "pyyaml==6.0.3", "nvidia-ml-py==13.615.71", "defusedxml==0.7.1",
        ),
        without_dependencies=("nvidia-resiliency-ext==0.4.1",),
        python=">=3.11,<3.13",
        shared="nvrx",
        probe=probe,
    )  # fmt: skip
