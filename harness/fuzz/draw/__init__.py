"""Random scenarios: drawn, shrunk, and written to files."""
