"""``chaos fuzz``: random scenarios, an oracle that says which went wrong, and a shrinker that makes
those small.
"""
