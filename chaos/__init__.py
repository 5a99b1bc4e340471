"""Faults and the words everybody shares: events, scenarios, schedules. Never imports torch at
module level.
"""
