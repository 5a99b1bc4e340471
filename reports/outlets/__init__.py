"""Outputs other than files of the run: the terminal, GitHub Actions, OpenTelemetry."""
