"""The search for files that the loader takes badly."""
