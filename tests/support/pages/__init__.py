"""Results and comparisons to draw pages of, and what a page holds."""
