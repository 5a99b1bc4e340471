"""What reports say, before any page is drawn: facts, figures, rows of metrics, series."""
