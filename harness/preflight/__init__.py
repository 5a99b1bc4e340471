"""Whether this machine's devices are fit, measured before a job starts (docs/health.md)."""
