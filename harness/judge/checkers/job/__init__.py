"""Checkers of the job: its data, commits, losses, state, progress and end."""
