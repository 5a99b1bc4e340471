"""Faults, and what all packages share: events, scenarios, schedules. Never imports torch at module
level.
"""
