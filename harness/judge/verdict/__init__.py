"""From findings and values to a verdict."""
