"""Processes of one machine: started, tied to their supervisor, watched, ended."""
