"""Series with and without planted anomalies, and what detectors make of them."""
