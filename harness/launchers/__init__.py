"""Ways to run ranks, one file each."""
