"""Health: sources, monitor and detectors."""
