"""``chaos fuzz``: random scenarios, an oracle that detects defects, and a shrinker that makes
failing scenarios small.
"""
