"""Decisions as pure functions: how to answer a failure, which process takes which rank, when to
save.
"""
