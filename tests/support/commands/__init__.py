"""Command lines that tests run."""
