"""Decisions as pure functions: what to do after a failure, who sits where, when to save."""
