"""Thresholds from null models, and estimates that few wild values do not move. Pure."""
