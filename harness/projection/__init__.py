"""Measured recoveries, projected to clusters of any size by formulas and by simulation."""
