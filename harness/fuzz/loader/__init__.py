"""The search for files that the loader handles badly."""
