"""Processes of one machine: how they are started, tied to their supervisor, watched and ended."""
