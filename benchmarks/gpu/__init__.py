"""The GPU benchmark, which fills docs/gpu-results.md: ``python -m benchmarks.gpu``."""
