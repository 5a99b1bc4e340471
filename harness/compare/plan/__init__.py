"""Plans a comparison: its arms, their order, and its directory."""
