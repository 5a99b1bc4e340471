"""Where results go that is no file of the run: the terminal, GitHub Actions, OpenTelemetry."""
