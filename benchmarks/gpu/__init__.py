"""The GPU benchmark, which makes docs/gpu-results.md: ``python -m benchmarks.gpu``."""
