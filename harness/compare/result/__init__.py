"""What a comparison found: outcomes, ratios, and what may be said of them. Pure."""
