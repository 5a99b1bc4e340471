"""From a scenario file to concrete, checked cells: ``extends``, ``--set``, matrix, names, checks,
errors by place.
"""
