"""Content shared by reports, independent of their format: facts, figures, rows of
metrics, series.
"""
