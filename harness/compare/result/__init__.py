"""Results of a comparison: outcomes, ratios, and the conclusions they support. Pure."""
