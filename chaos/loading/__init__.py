"""Loads a scenario file into concrete, checked cells: ``extends``, ``--set``, matrix, names,
checks, errors with positions.
"""
